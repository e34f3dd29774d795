"""A step's plan as the tensors that the decoder takes. Buffers are allocated once and filled with numpy.

What is returned by `StepInputs.build` is valid until the next call.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_worker.kernels.ops import AttentionMetadata
from engine_worker.sequence import Sequence
from engine_worker.step import ScheduledSequence, StepPlan

_Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Inputs of one step."""

    token_ids: Tensor  # int32 [T]
    meta: AttentionMetadata
    first_token: npt.NDArray[np.int32]  # [B]: index of each scheduled sequence's first token among the T
    failed: tuple[tuple[Sequence, str], ...]  # sequences whose tokens the model does not have


class _Buffer:
    """An int32 tensor on the CPU, and the same memory as a numpy array."""

    def __init__(self, size: int) -> None:
        self.array: _Int32 = np.zeros(size, dtype=np.int32)
        self.tensor = torch.from_numpy(self.array)


class StepInputs:
    """Owned by the runner; see the module."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_sequences: int,
        block_size: int,
        vocab_size: int,
        block_tables: _Int32,
        device: torch.device,
    ) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._tables = block_tables
        self._tables_tensor = torch.from_numpy(block_tables)
        self._device = device
        self._token_ids, self._positions, self._slots = (_Buffer(max_tokens) for _ in range(3))
        self._query_start = _Buffer(max_sequences + 1)
        self._seq_lens, self._rows = _Buffer(max_sequences), _Buffer(max_sequences)
        self._counting: _Int32 = np.arange(max_tokens, dtype=np.int32)

    def build(self, plan: StepPlan) -> Prepared:
        """The inputs of ``plan``, whose tokens and sequences are within the limits given at construction."""
        scheduled, num_tokens = plan.scheduled, plan.num_tokens
        count = len(scheduled)
        lengths = np.fromiter((item.num_tokens for item in scheduled), np.int32, count)
        starts = np.fromiter((item.start for item in scheduled), np.int32, count)
        rows, query_start = self._rows.array[:count], self._query_start.array[: count + 1]
        rows[:] = [_row(item.sequence) for item in scheduled]
        np.cumsum(lengths, out=query_start[1:])
        np.add(starts, lengths, out=self._seq_lens.array[:count])
        positions = self._positions.array[:num_tokens]
        np.add(self._counting[:num_tokens], np.repeat(starts - query_start[:-1], lengths), out=positions)
        self._fill_slots(positions, np.repeat(rows, lengths))
        failed = self._fill_tokens(scheduled, query_start)
        meta = AttentionMetadata(
            query_start=self._on_device(self._query_start, count + 1),
            seq_lens=self._on_device(self._seq_lens, count),
            block_table_rows=self._on_device(self._rows, count),
            block_tables=self._tables_tensor.to(self._device),
            slot_mapping=self._on_device(self._slots, num_tokens),
            positions=self._on_device(self._positions, num_tokens),
            max_query_len=int(lengths.max()),
            max_seq_len=int(self._seq_lens.array[:count].max()),
        )
        return Prepared(self._on_device(self._token_ids, num_tokens), meta, query_start[:-1], failed)

    def _fill_slots(self, positions: _Int32, rows: _Int32) -> None:
        blocks, offsets = np.divmod(positions, np.int32(self._block_size))
        slots = self._slots.array[: len(positions)]
        np.multiply(self._tables[rows, blocks], np.int32(self._block_size), out=slots)
        slots += offsets

    def _fill_tokens(
        self, scheduled: tuple[ScheduledSequence, ...], query_start: _Int32
    ) -> tuple[tuple[Sequence, str], ...]:
        token_ids = self._token_ids.array[: query_start[-1]]
        begin = 0
        for item in scheduled:
            end = begin + item.num_tokens
            token_ids[begin:end] = item.sequence.tokens[item.start : item.start + item.num_tokens]
            begin = end
        unknown = (token_ids < 0) | (token_ids >= self._vocab_size)
        if not unknown.any():
            return ()
        places = np.flatnonzero(unknown)
        owners = np.unique(np.searchsorted(query_start, places, side="right") - 1)
        reason = f"a token id is outside of the vocabulary of {self._vocab_size}"
        token_ids[unknown] = 0  # computed along, so that the other sequences are not held up
        return tuple((scheduled[owner].sequence, reason) for owner in owners)

    def _on_device(self, buffer: _Buffer, size: int) -> Tensor:
        return buffer.tensor[:size].to(self._device)


def _row(sequence: Sequence) -> int:
    assert sequence.block_table_row is not None, f"{sequence} is scheduled without blocks"
    return sequence.block_table_row
