"""How long anybody waits is bounded in steps and in tokens a step, whatever the others bring."""

from __future__ import annotations

import itertools

import pytest

from engine_worker.sequence import Sequence, SequenceStatus
from engine_worker.step import StepPlan, StepResult
from tests.unit.engine_worker.worlds import World

STREAMS = 8
PROMPTS = 8
LENGTH = 4000
CHUNK = 128


def busy_world(**settings: int) -> tuple[World, list[Sequence]]:
    """Streams that decode for longer than any test runs."""
    world = World(
        num_blocks=900,
        block_size=64,
        max_model_len=8192,
        **{"max_num_seqs": 32, "max_num_batched_tokens": 512, "max_prefill_tokens_beside_decodes": CHUNK, **settings},
    )
    streams = [world.sequence(30 + i, max_tokens=3000) for i in range(STREAMS)]
    world.add(*streams)
    while not all(item.num_output_tokens for item in streams):
        world.step()
    return world, streams


def prompt_tokens(plan: StepPlan) -> int:
    return plan.num_tokens - sum(item.num_tokens == 1 and item.samples for item in plan.scheduled)


def draws(result: StepResult, streams: list[Sequence]) -> bool:
    return {token.sequence.seq_id for token in result.sampled} >= {item.seq_id for item in streams}


def long_prompt(world: World, number: int, length: int = LENGTH, **more: object) -> Sequence:
    return world.sequence([(number * 131 + i * 7) % 900 for i in range(length)], max_tokens=2, **more)


def test_streams_draw_in_every_step_while_long_prompts_arrive_and_each_prompt_has_its_turn() -> None:
    world, streams = busy_world()
    prompts = [long_prompt(world, i) for i in range(PROMPTS)]
    world.add(*prompts)
    first_moved: dict[int, int] = {}
    first_token: dict[int, int] = {}
    for step in itertools.count(1):
        result = world.step()
        assert draws(result, streams)
        assert prompt_tokens(world.runner.plans[-1]) <= CHUNK
        for number, item in enumerate(prompts):
            if item.num_computed_tokens or item.status is SequenceStatus.FINISHED:
                first_moved.setdefault(number, step)
            if item.num_output_tokens:
                first_token.setdefault(number, step)
        if len(first_token) == PROMPTS:
            break
    # In the order of arrival, and not a token of the budget is wasted.
    for number in range(PROMPTS):
        assert first_moved[number] <= -(-number * LENGTH // CHUNK) + 1
        assert first_token[number] <= -(-(number + 1) * LENGTH // CHUNK) + 1


def test_a_long_prompt_gets_half_of_the_chunk_from_an_endless_stream_of_short_ones() -> None:
    world, streams = busy_world()
    long = long_prompt(world, 1)
    world.add(long)
    for step in range(1, 2 * LENGTH // CHUNK + 2):
        for number in range(4):
            world.add(world.sequence([step, number] * 20, max_tokens=1))  # more than the chunk holds
        before = long.num_computed_tokens
        result = world.step()
        assert draws(result, streams)
        assert prompt_tokens(world.runner.plans[-1]) <= CHUNK
        if long.num_output_tokens:
            return
        assert long.num_computed_tokens - before >= CHUNK // 2
    pytest.fail("the long prompt was not computed in time")


def test_a_prompt_moves_in_every_step_even_where_every_other_token_of_it_is_a_decode() -> None:
    world, streams = busy_world(max_num_seqs=16, max_num_batched_tokens=16)
    streams += [world.sequence(3 + i, max_tokens=2000) for i in range(7)]
    world.add(*streams[STREAMS:])
    while not all(item.num_output_tokens for item in streams):
        world.step()
    prompt = world.sequence(200, max_tokens=1)
    world.add(prompt)
    for step in range(1, 201):
        assert draws(world.step(), streams)
        assert prompt.num_computed_tokens == step or prompt.status is SequenceStatus.FINISHED
    assert prompt.status is SequenceStatus.FINISHED


@pytest.mark.parametrize("has_streams", [True, False])
def test_scored_prompts_take_half_as_many_tokens_a_step(has_streams: bool) -> None:
    world, streams = busy_world()
    if not has_streams:
        for item in streams:
            world.engine.cancel(item.request_id)
        streams = []
    length = 1000
    scored = long_prompt(world, 2, length, sampling={"prompt_logprobs": 1})
    world.add(scored)
    bound = (CHUNK if has_streams else world.settings.step_tokens) // 2
    num_scores = num_steps = 0
    while not scored.num_output_tokens:
        result = world.step()
        num_steps += 1
        assert draws(result, streams)
        of_step = sum(len(scores.logprobs) for scores in result.prompt_logprobs)
        assert of_step <= bound
        num_scores += of_step
    assert num_scores == length - 1
    assert num_steps <= -(-length // bound) + 1


def test_a_step_without_decodes_is_bounded_too() -> None:
    world = World(num_blocks=900, block_size=64, max_model_len=8192, max_num_batched_tokens=512)
    world.add(*[long_prompt(world, i) for i in range(3)])
    while world.engine.has_work:
        world.step()
    assert max(plan.num_tokens for plan in world.runner.plans) == 512
