"""Limits of a step come from steps like it; whatever is new has the fixed bound."""

from __future__ import annotations

from typing import Any

import pytest

from common.events import Grammar, SamplingParams
from engine_worker.sequence import Sequence, SequenceStatus
from engine_worker.step import ScheduledSequence, StepPlan
from engine_worker.step_limits import StepLimits

LEAST_S, MOST_S, FACTOR = 1.0, 60.0, 10.0
MANY = 20


def limits(factor: float = FACTOR) -> StepLimits:
    return StepLimits(LEAST_S, MOST_S, factor)


def sequence(prompt: int = 8, **sampling: Any) -> Sequence:
    return Sequence(
        seq_id=1,
        request_id="r",
        choice=0,
        prompt_token_ids=tuple(range(prompt)),
        sampling=SamplingParams(max_tokens=100, **sampling),
        max_model_len=4096,
    )


def plan(*items: tuple[Sequence, int, int], admitted: tuple[Sequence, ...] = ()) -> StepPlan:
    """``items``: sequence, start, number of tokens."""
    scheduled = tuple(ScheduledSequence(s, start, n, samples=True) for s, start, n in items)
    return StepPlan(step=1, scheduled=scheduled, num_tokens=sum(n for _, _, n in items), admitted=admitted)


def learnt(seconds: float, *, factor: float = FACTOR, times: int = MANY) -> tuple[StepLimits, StepPlan]:
    made, decode = limits(factor), plan((sequence(), 9, 1))
    for _ in range(times):
        made.limit_s(decode)
        made.learn(decode, seconds)
    return made, decode


def test_before_anything_is_known_the_fixed_bound_holds() -> None:
    made, decode = learnt(0.5, times=3)
    assert limits().limit_s(decode) == MOST_S
    assert made.limit_s(decode) == MOST_S


@pytest.mark.parametrize(("step_s", "limit_s"), [(0.01, LEAST_S), (0.5, 5.0), (20.0, MOST_S)])
def test_then_it_is_a_multiple_of_what_such_steps_take_within_lease_and_bound(step_s: float, limit_s: float) -> None:
    made, decode = learnt(step_s)
    assert made.limit_s(decode) == pytest.approx(limit_s)


def test_without_slack_the_fixed_bound_is_all() -> None:
    made, decode = learnt(0.01, factor=0)
    assert made.limit_s(decode) == MOST_S


def test_a_step_of_another_size_is_another_kind() -> None:
    made, _ = learnt(0.01)
    assert made.limit_s(plan((sequence(512), 0, 512))) == MOST_S, "more tokens"
    assert made.limit_s(plan((sequence(2048), 2047, 1))) == MOST_S, "more context"


def test_a_prompt_that_is_scored_is_another_kind_than_one_that_is_not() -> None:
    made, plain, scored = limits(), sequence(64), sequence(64, prompt_logprobs=5)
    for _ in range(MANY):
        made.learn(plan((plain, 0, 64)), 0.01)
    assert made.limit_s(plan((plain, 0, 64))) == LEAST_S
    assert made.limit_s(plan((scored, 0, 64))) == MOST_S


def test_one_long_step_raises_the_limit_and_is_forgotten_again() -> None:
    made, decode = learnt(0.01)
    made.learn(decode, 3.0)
    assert made.limit_s(decode) == pytest.approx(30.0)
    for _ in range(500):
        made.learn(decode, 0.01)
    assert made.limit_s(decode) == LEAST_S


@pytest.mark.parametrize("new", [{"logprobs": 5}, {"grammar": Grammar(kind="regex", source="a+")}, {"min_p": 0.1}])
def test_what_a_process_has_not_done_yet_may_take_its_time(new: dict[str, Any]) -> None:
    made, decode = learnt(0.01)
    first = sequence(**new)
    assert made.limit_s(plan((first, 9, 1), admitted=(first,))) == MOST_S
    for token in range(2):
        assert made.limit_s(decode) == MOST_S, "it may not have had its turn yet"
        first.append(token)
        made.learn(decode, 0.01)
    assert made.limit_s(decode) == LEAST_S
    second = sequence(**new)
    assert made.limit_s(plan((second, 9, 1), admitted=(second,))) == LEAST_S


def test_a_sequence_that_was_dropped_before_its_first_token_leaves_its_kind_unknown() -> None:
    made, decode = learnt(0.01)
    dropped = sequence(logprobs=1)
    made.limit_s(plan((dropped, 9, 1), admitted=(dropped,)))
    dropped.status = SequenceStatus.FINISHED
    made.learn(decode, 0.01)
    assert made.limit_s(decode) == LEAST_S
    again = sequence(logprobs=1)
    assert made.limit_s(plan((again, 9, 1), admitted=(again,))) == MOST_S
