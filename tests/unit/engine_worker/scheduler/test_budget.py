from __future__ import annotations

import pytest

from common.events import SamplingParams
from engine_worker.config import SchedulerSettings
from engine_worker.scheduler.budget import PrefillBudget, prefill_budget
from engine_worker.sequence import Sequence


def prompt(length: int) -> Sequence:
    return Sequence(
        seq_id=length,
        request_id="r",
        choice=0,
        prompt_token_ids=(1,) * length,
        sampling=SamplingParams(max_tokens=1),
        max_model_len=10_000,
    )


def share(budget: PrefillBudget, *lengths: int) -> list[int]:
    """Tokens for each prompt, in the order they ask."""
    items = [prompt(length) for length in lengths]
    for item in items:
        budget.grant(item)
    granted = {id(item): num_tokens for item, num_tokens in budget.settle()}
    return [granted.get(id(item), 0) for item in items]


@pytest.mark.parametrize(
    ("lengths", "granted"),
    [
        ((5,), [5]),
        ((500,), [100]),  # a long prompt alone has everything
        ((500, 30), [70, 30]),
        ((500, 30, 40), [50, 30, 20]),  # short ones get up to half
        ((500, 600, 30), [70, 0, 30]),  # one long one after the other
        ((30, 500), [30, 70]),
        ((45, 45, 45), [45, 45, 10]),
    ],
)
def test_short_prompts_pass_long_ones_and_long_ones_always_move(lengths: tuple[int, ...], granted: list[int]) -> None:
    assert share(PrefillBudget(left=100, long_threshold=50), *lengths) == granted


def test_a_budget_of_one_token_still_moves_a_long_prompt() -> None:
    assert share(PrefillBudget(left=1, long_threshold=50), 500) == [1]


@pytest.mark.parametrize(("num_decodes", "left"), [(0, 100), (1, 20), (90, 10), (100, 0)])
def test_decodes_bound_the_prompt_tokens_beside_them(num_decodes: int, left: int) -> None:
    settings = SchedulerSettings(
        max_num_seqs=100,
        max_num_batched_tokens=100,
        max_prefill_tokens_beside_decodes=20,
        long_prefill_token_threshold=9,
    )
    assert prefill_budget(settings, num_decodes).left == left


def test_scored_tokens_count_double_and_always_move() -> None:
    def scored(length: int) -> Sequence:
        item = prompt(length)
        item.num_scored_tokens = 1
        return item

    for left, plain, granted in ((100, 0, [50]), (100, 40, [40, 30]), (1, 0, [1]), (41, 40, [40, 1])):
        budget = PrefillBudget(left=left, long_threshold=500)
        items = [*([prompt(plain)] if plain else []), scored(300)]
        for item in items:
            budget.grant(item)
        assert [num_tokens for _, num_tokens in budget.settle()] == granted
