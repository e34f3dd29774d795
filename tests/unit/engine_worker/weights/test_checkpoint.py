"""Weights come in the format asked for, and keep their bits where they are in it already."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import CheckpointMismatch
from engine_worker.kernels.ops import DenseWeight, QuantizedWeight, Weight
from engine_worker.kernels.packing import dequantize
from engine_worker.weights.checkpoint import FormattedWeights, StoredFormat, convert
from engine_worker.weights.gguf import GgufCheckpoint
from tests.unit.engine_worker.weights.tiny_gguf import llama_metadata, llama_tensors, write_gguf

Q, K, V = (f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv")
SHAPES = [(64, 64), (32, 64), (32, 64)]


def _format(weight: Weight) -> StoredFormat:
    if isinstance(weight, DenseWeight):
        return "none"
    return "int8" if weight.mins is None else "int4"


@pytest.fixture
def checkpoint(tmp_path: Path) -> GgufCheckpoint:
    tensors = llama_tensors("Q4_1")
    tensors["blk.0.attn_v.weight"] = (tensors["blk.0.attn_v.weight"][0], "Q8_0")
    tensors["token_embd.weight"] = (tensors["token_embd.weight"][0], "Q8_0")
    return GgufCheckpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors, metadata=llama_metadata()))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_the_format_asked_for(checkpoint: GgufCheckpoint, quantization: StoredFormat) -> None:
    weights = FormattedWeights(checkpoint, quantization).matrices([Q, K, V], SHAPES)
    assert [_format(weight) for weight in weights] == [quantization] * 3


def test_bits_of_the_file_are_kept(checkpoint: GgufCheckpoint) -> None:
    (kept,) = FormattedWeights(checkpoint, "int4").matrices([Q], SHAPES[:1])
    original = checkpoint.weight(Q)
    assert isinstance(kept, QuantizedWeight)
    assert isinstance(original, QuantizedWeight)
    assert torch.equal(kept.values, original.values)
    assert torch.equal(kept.scales, original.scales)


def test_matrices_that_are_stacked_take_the_richest_format_of_theirs(checkpoint: GgufCheckpoint) -> None:
    weights = FormattedWeights(checkpoint, "auto")
    assert [_format(weight) for weight in weights.matrices([Q, K], SHAPES[:2])] == ["int4", "int4"]
    assert [_format(weight) for weight in weights.matrices([Q, K, V], SHAPES)] == ["int8"] * 3


def test_dense_means_the_very_numbers_of_the_file(checkpoint: GgufCheckpoint) -> None:
    (dense,) = FormattedWeights(checkpoint, "none").matrices([Q], SHAPES[:1])
    original = checkpoint.weight(Q)
    assert isinstance(original, QuantizedWeight)
    assert torch.equal(dense.values, dequantize(original))


def test_the_head_is_never_coarser_than_eight_bits(checkpoint: GgufCheckpoint) -> None:
    name, shape = "model.embed_tokens.weight", checkpoint.shape("model.embed_tokens.weight")
    assert len(shape) == 2
    assert _format(FormattedWeights(checkpoint, "int4").head(name, (shape[0], shape[1]))) == "int8"
    assert _format(FormattedWeights(checkpoint, "none").head(name, (shape[0], shape[1]))) == "none"


def test_another_shape_than_the_configuration_says(checkpoint: GgufCheckpoint) -> None:
    with pytest.raises(CheckpointMismatch, match=r"q_proj.*\[64, 64\].*\[128, 64\]"):
        FormattedWeights(checkpoint, "auto").matrices([Q], [(128, 64)])
    with pytest.raises(CheckpointMismatch, match=r"norm.*\[64\].*\[32\]"):
        FormattedWeights(checkpoint, "auto").vector("model.norm.weight", 32)


def test_rows_that_do_not_divide_into_groups_stay_dense() -> None:
    weight = DenseWeight(torch.ones(4, 40))
    assert convert(weight, "int8") is weight
