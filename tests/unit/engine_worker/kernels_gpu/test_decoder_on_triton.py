"""Whole decoders on the Triton operators give the logits that transformers gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from engine_worker.config import ComputeSettings
from engine_worker.kernels.gpu.launch import IS_INTERPRETED
from engine_worker.kernels.triton_ops import TritonOps
from engine_worker.models.config import parse_config
from engine_worker.runner.backend import choose_backend
from engine_worker.weights.model_files import open_model
from tests.unit.engine_worker.models.tiny_models import VOCAB_SIZE, PagedModel, make_model, reference_logits

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "phi3", "gemma2"])
def test_a_decoder_on_triton_equals_transformers(family: str, tmp_path: Path) -> None:
    model = make_model(family, tmp_path)
    tokens = torch.randint(0, VOCAB_SIZE, (45,), generator=torch.Generator().manual_seed(5)).tolist()
    other = tokens[::-1][:37]
    paged = PagedModel(tmp_path, TritonOps(torch.float32, DEVICE))
    first = paged.step([(0, 0, tokens[:33]), (1, 0, other[:-1])])
    second = paged.step([(1, len(other) - 1, other[-1:]), (0, 33, tokens[33:])])
    want, want_other = reference_logits(model, tokens), reference_logits(model, other)
    close = {"atol": 2e-4, "rtol": 1e-4}
    torch.testing.assert_close(first[:33].cpu(), want[:33], **close)
    torch.testing.assert_close(second[0].cpu(), want_other[-1], **close)
    torch.testing.assert_close(second[1:].cpu(), want[33:], **close)


def test_the_backend_is_chosen_by_name(tmp_path: Path) -> None:
    make_model("smollm2", tmp_path)
    config = parse_config(open_model(str(tmp_path), load_format="auto", revision="").config)
    backend = choose_backend(ComputeSettings(backend="triton", device=str(DEVICE)), "float32", config)
    assert backend.name == "triton"
    assert isinstance(backend.ops, TritonOps)
    with pytest.raises(ConfigError, match="device: 'toaster'"):
        choose_backend(ComputeSettings(device="toaster"), "auto", config)
