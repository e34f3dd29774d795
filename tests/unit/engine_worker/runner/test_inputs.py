"""A plan becomes tensors: every token at its position, every position in its slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.events import SamplingParams
from engine_worker.runner.inputs import StepInputs
from engine_worker.sequence import Sequence
from engine_worker.step import ScheduledSequence, StepPlan

BLOCK_SIZE = 4
TABLES = np.array([[7, 3, 9, 1], [0, 5, 2, 8], [4, 6, 11, 10]], dtype=np.int32)


@pytest.fixture
def inputs() -> StepInputs:
    return StepInputs(
        max_tokens=32,
        max_sequences=3,
        block_size=BLOCK_SIZE,
        vocab_size=100,
        block_tables=TABLES,
        device=torch.device("cpu"),
    )


def _scheduled(row: int, tokens: list[int], start: int, num_tokens: int) -> ScheduledSequence:
    sequence = Sequence(
        seq_id=row,
        request_id=str(row),
        choice=0,
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(max_tokens=4),
        max_model_len=64,
    )
    sequence.block_table_row = row
    return ScheduledSequence(sequence, start, num_tokens, start + num_tokens == len(tokens))


def _plan(*scheduled: ScheduledSequence) -> StepPlan:
    return StepPlan(step=1, scheduled=scheduled, num_tokens=sum(item.num_tokens for item in scheduled))


def test_decodes_and_a_chunk(inputs: StepInputs) -> None:
    plan = _plan(
        _scheduled(2, list(range(10, 20)), 9, 1), _scheduled(0, [50], 0, 1), _scheduled(1, list(range(60, 75)), 2, 4)
    )
    prepared = inputs.build(plan)
    meta = prepared.meta
    assert prepared.token_ids.tolist() == [19, 50, 62, 63, 64, 65]
    assert meta.query_start.tolist() == [0, 1, 2, 6]
    assert prepared.first_token.tolist() == [0, 1, 2]
    assert meta.seq_lens.tolist() == [10, 1, 6]
    assert meta.block_table_rows.tolist() == [2, 0, 1]
    assert meta.positions.tolist() == [9, 0, 2, 3, 4, 5]
    # position 9 of row 2: block 11, offset 1; of row 1: 2 and 3 in block 0, then block 5
    assert meta.slot_mapping.tolist() == [45, 28, 2, 3, 20, 21]
    assert (meta.max_query_len, meta.max_seq_len) == (4, 10)
    assert prepared.failed == ()
    for tensor in (meta.query_start, meta.seq_lens, meta.slot_mapping, meta.positions, prepared.token_ids):
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()


def test_the_block_tables_are_shared_and_not_copied(inputs: StepInputs) -> None:
    meta = inputs.build(_plan(_scheduled(0, [1, 2], 0, 2))).meta
    assert meta.block_tables.data_ptr() == TABLES.ctypes.data


@pytest.mark.parametrize("unknown", [-1, 100, 2**31 - 1])
def test_tokens_outside_of_the_vocabulary_are_told_apart_by_sequence(inputs: StepInputs, unknown: int) -> None:
    good, bad = _scheduled(0, [1, 2, 3], 0, 3), _scheduled(1, [4, unknown, 5, unknown], 0, 4)
    prepared = inputs.build(_plan(good, bad, _scheduled(2, [6], 0, 1)))
    assert [sequence for sequence, _ in prepared.failed] == [bad.sequence]
    assert prepared.token_ids.tolist() == [1, 2, 3, 4, 0, 5, 0, 6]


def test_a_step_of_decodes_alone_has_the_inputs_of_any_other_step(inputs: StepInputs) -> None:
    decodes = [_scheduled(2, list(range(10, 20)), 9, 1), _scheduled(0, [50], 0, 1), _scheduled(1, [1, 2, 3], 2, 1)]
    kept = inputs.build(_plan(*decodes[:2]))  # tensors of another size, and then of the same size again
    assert kept.token_ids.tolist() == [19, 50]
    for chosen in (decodes, decodes[1:], decodes):
        alone = inputs.build(_plan(*chosen))
        general = inputs.build(_plan(*chosen, _scheduled(1, list(range(60, 75)), 4, 2)))
        count = len(chosen)
        assert alone.token_ids.tolist() == general.token_ids.tolist()[:count]
        for name in ("seq_lens", "block_table_rows", "slot_mapping", "positions"):
            assert getattr(alone.meta, name).tolist() == getattr(general.meta, name).tolist()[:count], name
        assert alone.meta.query_start.tolist() == list(range(count + 1))
        assert alone.first_token.tolist() == list(range(count))
        assert alone.meta.max_query_len == 1
        assert alone.meta.max_seq_len == max(alone.meta.seq_lens.tolist())
        assert alone.sampling == [item.sequence for item in chosen]
        assert alone.sampling_rows is None


@pytest.mark.parametrize("seed", range(5))
def test_the_short_way_gives_what_the_long_way_gives_at_any_size(seed: int) -> None:
    draw = np.random.default_rng(seed)
    tables = draw.permutation(64 * 16).reshape(64, 16).astype(np.int32)
    limits = {"max_tokens": 256, "max_sequences": 64, "block_size": BLOCK_SIZE, "vocab_size": 100}
    short, long = (StepInputs(**limits, block_tables=tables, device=torch.device("cpu")) for _ in range(2))
    long._decodes = None
    for _ in range(60):
        count = int(draw.integers(1, 65))
        rows, is_plain = draw.permutation(64)[:count].tolist(), draw.random() < 0.6
        scheduled = []
        for row in rows:
            tokens = draw.integers(0, 101 if draw.random() < 0.02 else 100, int(draw.integers(1, 62))).tolist()
            num_tokens = 1 if is_plain or draw.random() < 0.9 else int(draw.integers(1, min(len(tokens), 4) + 1))
            start = len(tokens) - num_tokens - int(not is_plain and len(tokens) > num_tokens and draw.random() < 0.1)
            scheduled.append(_scheduled(row, tokens, start, num_tokens))
        plan = _plan(*scheduled)
        one, other = short.build(plan), long.build(plan)
        for name in ("query_start", "seq_lens", "block_table_rows", "slot_mapping", "positions"):
            assert torch.equal(getattr(one.meta, name), getattr(other.meta, name)), name
        assert torch.equal(one.token_ids, other.token_ids)
        assert (one.meta.max_query_len, one.meta.max_seq_len) == (other.meta.max_query_len, other.meta.max_seq_len)
        assert one.first_token.tolist() == other.first_token.tolist()
        assert (one.sampling, one.failed) == (other.sampling, other.failed)
        ends = [list(range(count)) if way.sampling_rows is None else way.sampling_rows.tolist() for way in (one, other)]
        assert ends[0] == ends[1]
