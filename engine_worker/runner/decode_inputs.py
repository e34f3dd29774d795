"""The inputs of the commonest step: one token for each of some sequences, each of which draws the next.

At small batches such a step is a few milliseconds, so its inputs are made in buffers and tensors that are kept, by
plain Python: for few rows that is faster than numpy, and unlike numpy's indexing it never releases the interpreter's
lock, which the I/O thread would take just when the engine wants to go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine_worker.kernels.ops import AttentionMetadata
from engine_worker.runner.step_buffer import Int32s
from engine_worker.sequence import Sequence
from engine_worker.step import ScheduledSequence

_MOST_ROWS: Final = 256  # beyond, numpy is faster


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Valid until the next call of `DecodeInputs.build`."""

    token_ids: Tensor  # int32 [B]
    meta: AttentionMetadata
    first_token: Int32s  # [B]: 0, 1, 2, ...
    sequences: list[Sequence]


class DecodeInputs:
    """For models on the CPU, whose tensors are the very memory that is filled here."""

    def __init__(self, max_sequences: int, block_size: int, vocab_size: int, block_tables: Int32s) -> None:
        self._most_rows = min(max_sequences, _MOST_ROWS)
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._tables = block_tables
        self._tables_tensor = torch.from_numpy(block_tables)
        self._arrays: Int32s = np.zeros((5, self._most_rows), dtype=np.int32)  # tokens, positions, slots, lengths, rows
        self._counting: Int32s = np.arange(self._most_rows + 1, dtype=np.int32)
        self._tensors: dict[int, tuple[Tensor, ...]] = {}  # of the first so many rows

    def build(self, scheduled: tuple[ScheduledSequence, ...]) -> DecodeStep | None:
        """None for a step of another kind: more rows, several tokens, no draw, or a token the model does not have."""
        count = len(scheduled)
        if not 0 < count <= self._most_rows:
            return None
        entry, size, vocab_size = self._tables.item, self._block_size, self._vocab_size
        sequences, tokens, positions, slots, rows = [], [], [], [], []
        for item in scheduled:
            sequence, position = item.sequence, item.start
            token, row = sequence.tokens.item(position), sequence.block_table_row
            if item.num_tokens != 1 or not item.samples or not 0 <= token < vocab_size:
                return None
            assert row is not None, f"{sequence} is scheduled without blocks"
            sequences.append(sequence)
            tokens.append(token)
            positions.append(position)
            slots.append(entry(row, position // size) * size + position % size)
            rows.append(row)
        arrays = self._arrays
        arrays[0, :count] = tokens
        arrays[1, :count] = positions
        arrays[2, :count] = slots
        arrays[3, :count] = [position + 1 for position in positions]
        arrays[4, :count] = rows
        token_ids, position_ids, slot_ids, lengths, row_ids, starts = self._tensors_of(count)
        meta = AttentionMetadata(
            query_start=starts,
            seq_lens=lengths,
            block_table_rows=row_ids,
            block_tables=self._tables_tensor,
            slot_mapping=slot_ids,
            positions=position_ids,
            max_query_len=1,
            max_seq_len=max(positions) + 1,
        )
        return DecodeStep(token_ids, meta, self._counting[:count], sequences)

    def _tensors_of(self, count: int) -> tuple[Tensor, ...]:
        tensors = self._tensors.get(count)
        if tensors is None:
            columns = tuple(torch.from_numpy(array[:count]) for array in self._arrays)
            tensors = self._tensors[count] = (*columns, torch.from_numpy(self._counting[: count + 1]))
        return tensors
