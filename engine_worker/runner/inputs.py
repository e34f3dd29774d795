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
from engine_worker.runner.decode_inputs import DecodeInputs
from engine_worker.runner.device_tables import DeviceTables
from engine_worker.runner.step_buffer import Int32s, StepBuffer
from engine_worker.sequence import Sequence
from engine_worker.step import ScheduledSequence, StepPlan


@dataclass(frozen=True, slots=True)
class Prepared:
    """Inputs of one step."""

    token_ids: Tensor  # int32 [T]
    meta: AttentionMetadata
    first_token: npt.NDArray[np.int32]  # [B]: index of each scheduled sequence's first token among the T
    sampling: list[Sequence]  # that draw a token, in the plan's order
    sampling_rows: Tensor | None  # int32: index of the last token of each; None: they are the T tokens, in order
    failed: tuple[tuple[Sequence, str], ...]  # sequences whose tokens the model does not have


class StepInputs:
    """Owned by the runner; see the module."""

    def __init__(
        self,
        *,
        max_tokens: int,
        max_sequences: int,
        block_size: int,
        vocab_size: int,
        block_tables: Int32s,
        device: torch.device,
        padding_block: int | None = None,
    ) -> None:
        """``padding_block``: a block that no sequence has, for batches that are padded; None: none ever is.

        On a GPU, and for padded batches anywhere, the device has tables of its own.
        """
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._tables = block_tables
        self._padding_slot = np.int32((padding_block or 0) * block_size)
        is_mirrored = device.type != "cpu" or padding_block is not None
        self._mirror = DeviceTables(block_tables, device, padding_block or 0) if is_mirrored else None
        self._tables_tensor = self._mirror.tensor if self._mirror else torch.from_numpy(block_tables)
        self._decodes = None if is_mirrored else DecodeInputs(max_sequences, block_size, vocab_size, block_tables)
        # A padded batch is less than twice as large. Places and values of all tables' entries come on top.
        capacity = 3 * max_tokens + 14 * max_sequences + 2 * (block_tables.size if is_mirrored else 0)
        self._buffer = StepBuffer(capacity, device, is_mirrored=is_mirrored)
        self._counting: Int32s = np.arange(max(max_tokens, 2 * max_sequences) + 1, dtype=np.int32)

    def build(self, plan: StepPlan, padded_to: int | None = None) -> Prepared:
        """The inputs of ``plan``, whose tokens and sequences are within the limits given at construction.

        ``padded_to``: for plans with one token a sequence, so many rows, up to twice as many as there are. What is
        added are sequences of one token in the padding block.
        """
        scheduled, num_tokens = plan.scheduled, plan.num_tokens
        count = len(scheduled)
        if self._decodes is not None and num_tokens == count and (step := self._decodes.build(scheduled)) is not None:
            return Prepared(step.token_ids, step.meta, step.first_token, step.sequences, None, ())
        all_tokens, all_sequences = (num_tokens, count) if padded_to is None else (padded_to, padded_to)
        buffer = self._buffer
        buffer.begin()
        token_ids, positions, slots = (buffer.section(all_tokens) for _ in range(3))
        query_start, seq_lens, rows = (buffer.section(all_sequences + extra) for extra in (1, 0, 0))
        lengths = np.fromiter((item.num_tokens for item in scheduled), np.int32, count)
        starts = np.fromiter((item.start for item in scheduled), np.int32, count)
        rows[:count] = [_row(item.sequence) for item in scheduled]
        query_start[0] = 0
        np.cumsum(lengths, out=query_start[1 : count + 1])
        np.add(starts, lengths, out=seq_lens[:count])
        np.add(
            self._counting[:num_tokens],
            np.repeat(starts - query_start[:count], lengths),
            out=positions[:num_tokens],
        )
        self._fill_slots(positions[:num_tokens], np.repeat(rows[:count], lengths), slots[:num_tokens])
        failed = self._fill_tokens(scheduled, query_start[: count + 1], token_ids)
        max_seq_len = int(seq_lens[:count].max())
        if padded_to is not None:
            assert self._mirror is not None, "padding needs a padding block"
            token_ids[count:] = positions[count:] = 0
            slots[count:], seq_lens[count:], rows[count:] = self._padding_slot, 1, self._mirror.padding_row
            query_start[count:] = self._counting[count : all_sequences + 1]
        ends, sampling = _sampling(scheduled, query_start, failed)
        is_selected = len(sampling) < num_tokens
        if is_selected:
            buffer.section(len(ends))[:] = ends
        sent = self._send(rows[:count], -(-max_seq_len // self._block_size))
        meta = AttentionMetadata(
            query_start=sent[3],
            seq_lens=sent[4],
            block_table_rows=sent[5],
            block_tables=self._tables_tensor,
            slot_mapping=sent[2],
            positions=sent[1],
            max_query_len=int(lengths.max()),
            max_seq_len=max_seq_len,
        )
        return Prepared(sent[0], meta, query_start[:count], sampling, sent[6] if is_selected else None, failed)

    def _send(self, rows: Int32s, num_columns: int) -> list[Tensor]:
        if self._mirror is None:
            return self._buffer.send()
        for part in self._mirror.changes(rows, num_columns):
            self._buffer.section(len(part))[:] = part
        sent = self._buffer.send()
        self._mirror.apply(*sent[-2:])
        return sent

    def _fill_slots(self, positions: Int32s, rows: Int32s, slots: Int32s) -> None:
        blocks, offsets = np.divmod(positions, np.int32(self._block_size))
        np.multiply(self._tables[rows, blocks], np.int32(self._block_size), out=slots)
        slots += offsets

    def _fill_tokens(
        self, scheduled: tuple[ScheduledSequence, ...], query_start: Int32s, token_ids: Int32s
    ) -> tuple[tuple[Sequence, str], ...]:
        token_ids = token_ids[: query_start[-1]]
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


def _sampling(
    scheduled: tuple[ScheduledSequence, ...], query_start: Int32s, failed: tuple[tuple[Sequence, str], ...]
) -> tuple[list[int], list[Sequence]]:
    """The sequences that draw a token and have not failed, with the index of each one's last token of this step."""
    excluded = {id(sequence) for sequence, _ in failed}
    ends = query_start[1 : len(scheduled) + 1].tolist()
    chosen = [
        (end - 1, item.sequence)
        for end, item in zip(ends, scheduled, strict=True)
        if item.samples and id(item.sequence) not in excluded
    ]
    return [row for row, _ in chosen], [sequence for _, sequence in chosen]


def _row(sequence: Sequence) -> int:
    assert sequence.block_table_row is not None, f"{sequence} is scheduled without blocks"
    return sequence.block_table_row
