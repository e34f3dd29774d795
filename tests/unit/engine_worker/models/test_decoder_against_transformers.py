"""Each family, in fp32, gives the logits that transformers gives, however its tokens are cut into steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_worker.kernels.build import KernelsUnavailable
from engine_worker.kernels.cpu import CpuOps
from engine_worker.kernels.ops import Ops
from engine_worker.kernels.ops_torch import TorchOps
from tests.unit.engine_worker.models.tiny_models import FAMILIES, VOCAB_SIZE, PagedModel, make_model, reference_logits


def _native() -> Ops:
    try:
        return CpuOps("fp32", num_threads=2)
    except KernelsUnavailable as error:
        pytest.skip(str(error))


OPS: dict[str, Callable[[], Ops]] = {"torch": lambda: TorchOps(torch.float32), "native": _native}
LENGTH = 150  # more than the sliding windows, and than four blocks


def _tokens(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    return directory, make_model(request.param, directory)


@pytest.fixture(params=OPS)
def paged(request: pytest.FixtureRequest, saved: tuple[Path, Any]) -> PagedModel:
    return PagedModel(saved[0], OPS[request.param]())


def _assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def test_a_whole_prompt_in_one_step(saved: tuple[Path, Any], paged: PagedModel) -> None:
    tokens = _tokens(LENGTH, 1)
    _assert_same(paged.step([(0, 0, tokens)]), reference_logits(saved[1], tokens))


def test_a_prompt_in_chunks_and_then_token_by_token(saved: tuple[Path, Any], paged: PagedModel) -> None:
    tokens = _tokens(LENGTH, 2)
    cuts = [0, 7, 64, 65, 129, *range(140, LENGTH + 1)]
    parts = [paged.step([(1, start, tokens[start:end])]) for start, end in itertools.pairwise(cuts)]
    _assert_same(torch.cat(parts), reference_logits(saved[1], tokens))


def test_decodes_of_different_lengths_beside_a_chunk(saved: tuple[Path, Any], paged: PagedModel) -> None:
    lengths = (33, 120, 5, 96)
    sequences = [_tokens(length, 3 + length) for length in lengths]
    long = _tokens(LENGTH, 4)
    paged.step([(row, 0, tokens[:-1]) for row, tokens in enumerate(sequences)] + [(4, 0, long[:70])])
    decodes = [(row, len(tokens) - 1, tokens[-1:]) for row, tokens in enumerate(sequences)]
    logits = paged.step([*decodes, (4, 70, long[70:])])
    for row, tokens in enumerate(sequences):
        _assert_same(logits[row], reference_logits(saved[1], tokens)[-1])
    _assert_same(logits[len(lengths) :], reference_logits(saved[1], long)[70:])
