"""Blocks in which a failed sequence has left numbers that are none.

Operators read whole groups of tokens and give those behind the end of a sequence the weight 0; but 0 times "not a
number" is not a number. So what a failed sequence leaves must not be met by the next one that gets its blocks.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_worker.kernels.ops import KvCache
from engine_worker.sequence import Sequence
from engine_worker.step import StepPlan


class StaleBlocks:
    """Blocks to be cleared before a sequence starts on them. Costs nothing while nothing has failed."""

    def __init__(self, cache: KvCache, block_tables: npt.NDArray[np.int32]) -> None:
        self._cache = cache
        self._tables = block_tables
        self._blocks: set[int] = set()

    def leave(self, sequence: Sequence) -> None:
        """``sequence``, which still has its blocks, has failed."""
        if sequence.block_table_row is not None:
            self._blocks.update(self._tables[sequence.block_table_row, : sequence.num_blocks].tolist())

    def clear_for(self, plan: StepPlan) -> None:
        """Clear those in which ``plan`` writes the first token: nobody else reads them, and nothing in them counts."""
        if not self._blocks:
            return
        size = self._cache.block_size
        started: set[int] = set()
        for item in plan.scheduled:
            first, end = -(-item.start // size), -(-(item.start + item.num_tokens) // size)
            started.update(self._tables[item.sequence.block_table_row, first:end].tolist())
        stale = self._blocks & started
        if stale:
            self._cache.clear(sorted(stale))
            self._blocks -= stale


def not_finite(plan: StepPlan, hidden: Tensor) -> list[Sequence]:
    """Sequences of ``plan`` that have a hidden state, fp32 [T, D], which is not finite.

    Waits for the device, so it is meant for the CPU.
    """
    if _sum_is_finite(hidden):
        return []
    is_finite = torch.isfinite(hidden.sum(dim=1)).tolist()
    found, first = [], 0
    for item in plan.scheduled:
        if not all(is_finite[first : first + item.num_tokens]):
            found.append(item.sequence)
        first += item.num_tokens
    return found


def _sum_is_finite(hidden: Tensor) -> bool:
    if hidden.device.type != "cpu":
        return bool(torch.isfinite(hidden.sum()))
    with np.errstate(over="ignore", invalid="ignore"):  # torch's sum takes several times as long to begin
        return math.isfinite(hidden.numpy().sum())
