from __future__ import annotations

import pytest
from pydantic import ValidationError

from engine_worker.config import SchedulerSettings


def test_every_running_sequence_must_be_able_to_decode_in_a_step() -> None:
    with pytest.raises(ValidationError, match="must be at least max_num_seqs"):
        SchedulerSettings(max_num_seqs=100, max_num_batched_tokens=50)


def test_budgets_that_are_not_given_follow_the_device_and_the_seats() -> None:
    on_cpu = SchedulerSettings().for_device(is_cpu=True)
    on_gpu = SchedulerSettings().for_device(is_cpu=False)
    assert (on_cpu.max_num_batched_tokens, on_cpu.max_prefill_tokens_beside_decodes) == (512, 256)
    assert (on_gpu.max_num_batched_tokens, on_gpu.max_prefill_tokens_beside_decodes) == (2048, 1024)
    assert SchedulerSettings(max_num_seqs=3000).for_device(is_cpu=True).step_tokens == 3000
    given = SchedulerSettings(max_num_batched_tokens=64, max_prefill_tokens_beside_decodes=8)
    assert given.for_device(is_cpu=False) == given
    assert (given.step_tokens, given.chunk_tokens) == (64, 8)


def test_a_step_too_small_for_anything_is_refused() -> None:
    with pytest.raises(ValidationError, match="max_num_batched_tokens must be at least 16, or 0"):
        SchedulerSettings(max_num_seqs=1, max_num_batched_tokens=15)
