"""GGUF files: bits kept, rows put back in order, names translated, damage refused."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from common.errors import CheckpointMismatch, ModelFileMissing, UnsupportedModel
from engine_worker.kernels.ops import DenseWeight, QuantizedWeight
from engine_worker.kernels.packing import dequantize
from engine_worker.weights.gguf import GgufCheckpoint
from engine_worker.weights.gguf_file import GgufFile
from tests.unit.engine_worker.weights.tiny_gguf import llama_metadata, llama_tensors, permute, write_gguf

_RANDOM = np.random.default_rng(11)
_DOWN = "model.layers.1.mlp.down_proj.weight"


def _values(rows: int, columns: int) -> np.ndarray:
    return _RANDOM.standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_1"])
def test_grouped_formats_keep_their_bits(tmp_path: Path, type_name: str) -> None:
    values = _values(48, 96)
    path = write_gguf(tmp_path / "m.gguf", tensors={"blk.1.ffn_down.weight": (values, type_name)})
    weight = GgufCheckpoint(path).weight(_DOWN)
    assert isinstance(weight, QuantizedWeight)
    kind = gguf.GGMLQuantizationType[type_name]
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(values, kind), kind))
    torch.testing.assert_close(dequantize(weight), expected, atol=0, rtol=0)
    assert weight.values.dtype == (torch.int8 if type_name == "Q8_0" else torch.uint8)
    assert (weight.mins is None) == (type_name == "Q8_0")
    assert GgufCheckpoint(path).stored_format(_DOWN) == ("int8" if type_name == "Q8_0" else "int4")


@pytest.mark.parametrize(("type_name", "columns"), [("Q5_0", 64), ("Q5_1", 64), ("Q4_K", 256), ("Q6_K", 256)])
def test_other_quantised_types_are_dequantised_as_gguf_does(tmp_path: Path, type_name: str, columns: int) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = _RANDOM.integers(0, 60, (8, columns // block * num_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.1.ffn_down.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weight = GgufCheckpoint(tmp_path / "m.gguf").weight(_DOWN)
    assert isinstance(weight, DenseWeight)
    torch.testing.assert_close(weight.values.numpy(), gguf.dequantize(raw, kind), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("type_name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
)
def test_dense_types(tmp_path: Path, type_name: str, dtype: torch.dtype) -> None:
    values = _values(6, 32)
    weight = GgufCheckpoint(
        write_gguf(tmp_path / "m.gguf", tensors={"blk.1.ffn_down.weight": (values, type_name)})
    ).weight(_DOWN)
    assert isinstance(weight, DenseWeight)
    assert weight.values.dtype == dtype
    torch.testing.assert_close(weight.values, torch.from_numpy(values).to(dtype), atol=0, rtol=0)


def test_q_and_k_of_a_llama_are_put_back_in_order(tmp_path: Path) -> None:
    q, k, v = _values(64, 64), _values(32, 64), _values(32, 64)
    tensors = {
        "blk.0.attn_q.weight": (permute(q, 4), "Q8_0"),
        "blk.0.attn_k.weight": (permute(k, 2), "F32"),
        "blk.0.attn_k.bias": (permute(k[:, 0], 2), "F32"),
        "blk.0.attn_v.weight": (v, "F32"),
    }
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", tensors=tensors, metadata=llama_metadata()))
    attention = "model.layers.0.self_attn."
    kind = gguf.GGMLQuantizationType.Q8_0
    rounded = torch.from_numpy(gguf.dequantize(gguf.quantize(q, kind), kind))
    weight = checkpoint.weight(f"{attention}q_proj.weight")
    assert isinstance(weight, QuantizedWeight)
    torch.testing.assert_close(dequantize(weight), rounded, atol=0, rtol=0)
    for name, expected in (("k_proj.weight", k), ("v_proj.weight", v)):
        torch.testing.assert_close(checkpoint.weight(attention + name).values.numpy(), expected, atol=0, rtol=0)
    torch.testing.assert_close(checkpoint.vector(f"{attention}k_proj.bias").numpy(), k[:, 0], atol=0, rtol=0)


def test_other_architectures_are_in_order_already(tmp_path: Path) -> None:
    q = _values(64, 64)
    path = write_gguf(tmp_path / "m.gguf", "qwen2", tensors={"blk.0.attn_q.weight": (q, "F32")})
    weight = GgufCheckpoint(path).weight("model.layers.0.self_attn.q_proj.weight")
    torch.testing.assert_close(weight.values.numpy(), q, atol=0, rtol=0)


def test_gemma_norms_lose_the_one_that_the_converter_added(tmp_path: Path) -> None:
    norm = np.array([1.5, 0.75, 1.0], np.float32)
    path = write_gguf(tmp_path / "m.gguf", "gemma", tensors={"output_norm.weight": (norm, "F32")})
    assert GgufCheckpoint(path).vector("model.norm.weight").tolist() == [0.5, -0.25, 0.0]


def test_a_missing_tensor_is_named_in_both_languages(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "m.gguf", tensors=llama_tensors()))
    assert not checkpoint.has("lm_head.weight")
    with pytest.raises(CheckpointMismatch, match=r"blk\.7\.ffn_up\.weight \(model\.layers\.7\.mlp\.up_proj"):
        checkpoint.weight("model.layers.7.mlp.up_proj.weight")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelFileMissing, match="nothing"):
        GgufFile(tmp_path / "nothing.gguf")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not this", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 40])
def test_what_is_no_gguf_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointMismatch, match=r"m\.gguf"):
        GgufFile(path)


def test_an_unknown_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
    with pytest.raises(UnsupportedModel, match="version 9"):
        GgufFile(tmp_path / "m.gguf")


@pytest.mark.parametrize("share", [0.05, 0.3, 0.7, 0.999])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, share: float) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors=llama_tensors(), metadata=llama_metadata())
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointMismatch, match=r"cut short|damaged"):
        GgufFile(path)


def test_one_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="split"):
        GgufFile(write_gguf(tmp_path / "m.gguf", metadata={"split.count": 3}))


def test_metadata_of_every_type_is_read(tmp_path: Path) -> None:
    metadata = {"a.int": 7, "a.float": 0.5, "a.bool": True, "a.text": "größe", "a.list": [1, 2], "a.texts": ["x", "yz"]}
    read = GgufFile(write_gguf(tmp_path / "m.gguf", metadata=metadata)).metadata
    assert {key: read[key] for key in metadata} == metadata
