"""What a mask is recognised as, by looking at who sees whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine_worker.models.hf_refusals import Refused
from engine_worker.models.hf_trace import window_of

_CPU = torch.device("cpu")


def _causal(_b: Any, _h: Any, q: Any, k: Any) -> Any:
    return k <= q


def _window(size: int) -> Any:
    return lambda _b, _h, q, k: (k <= q) & (k > q - size)


@pytest.mark.parametrize("num_positions", [1, 2, 100, 5000])
def test_a_causal_mask_has_no_window(num_positions: int) -> None:
    assert window_of(_causal, num_positions, _CPU) is None


@pytest.mark.parametrize("size", [1, 7, 64, 4096])
def test_a_sliding_window_is_measured(size: int) -> None:
    assert window_of(_window(size), 5000, _CPU) == size


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    assert window_of(_window(4096), 4096, _CPU) is None


@pytest.mark.parametrize(
    "mask",
    [
        lambda _b, _h, q, k: (k >= 0) & (q >= 0),  # everybody sees everybody
        lambda _b, _h, q, k: (k <= q) & (k // 16 == q // 16),  # chunks
        lambda _b, _h, q, k: (k <= q) | (k < 5),  # a prefix that sees itself
        lambda _b, _h, q, k: ((k <= q) & (k > q - 8)) | (k < 4) & (k <= q),  # a window and the first tokens
    ],
)
def test_other_masks_are_refused(mask: Any) -> None:
    with pytest.raises(Refused, match="neither causal nor a causal sliding window"):
        window_of(mask, 4999, _CPU)


def test_masks_made_for_one_text_are_refused() -> None:
    seen = torch.ones(24, dtype=torch.bool)
    with pytest.raises(Refused, match="depends on the tokens"):
        window_of(lambda _b, _h, q, k: (k <= q) & seen[k], 128, _CPU)
