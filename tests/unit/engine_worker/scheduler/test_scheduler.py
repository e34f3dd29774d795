"""How steps are shared: who waits, who moves, who gives way."""

from __future__ import annotations

import pytest

from common.errors import EngineError
from engine_worker.sequence import SequenceStatus
from engine_worker.step import StepOutput
from tests.unit.engine_worker.worlds import World, expected_output


def test_decodes_come_first_and_run_in_every_step_beside_a_long_prompt() -> None:
    world = World(num_blocks=128, max_prefill_tokens_beside_decodes=8)
    talking = [world.sequence(5, max_tokens=60), world.sequence(6, max_tokens=60)]
    world.add(*talking)
    world.step()
    long = world.sequence(200, max_tokens=2)
    world.add(long)
    steps = 0
    while long.num_output_tokens == 0:
        result = world.step()
        steps += 1
        plan = world.runner.plans[-1]
        assert [item.sequence for item in plan.scheduled[:2]] == talking
        assert {token.sequence for token in result.sampled} >= set(talking)
        assert plan.scheduled[2].num_tokens <= 8
    assert steps == 25


def test_a_short_prompt_overtakes_long_ones_that_go_on_moving() -> None:
    world = World(max_num_batched_tokens=16, long_prefill_token_threshold=20)
    first, second = world.sequence(120, max_tokens=1), world.sequence(121, max_tokens=1)
    world.add(first, second)
    world.step()
    short = world.sequence(7, max_tokens=1)
    world.add(short)
    before = first.num_computed_tokens
    world.step()
    assert short.status is SequenceStatus.FINISHED
    assert first.num_computed_tokens == before + 9
    assert second.status is SequenceStatus.WAITING
    world.run()
    assert second.output_token_ids() == expected_output(second)


def test_a_flood_of_short_prompts_does_not_starve_a_long_one() -> None:
    world = World(max_num_batched_tokens=16, long_prefill_token_threshold=20, max_num_seqs=16)
    long = world.sequence(150, max_tokens=1)
    world.add(long)
    for number in range(60):
        world.add(world.sequence([number] * 7, max_tokens=1), world.sequence([number, number, 1] * 3, max_tokens=1))
        world.step()
        if long.status is SequenceStatus.FINISHED:
            break
    assert number < 25


def test_a_flood_of_prompts_does_not_starve_decodes() -> None:
    world = World(num_blocks=256, max_num_batched_tokens=32, max_num_seqs=16)
    talking = world.sequence(5, max_tokens=40)
    world.add(talking)
    for number in range(40):
        world.add(world.sequence([number] * 40, max_tokens=3))
        world.step()
    assert talking.num_output_tokens == 40


def test_seats_are_bounded() -> None:
    world = World(max_num_seqs=3)
    world.add(*[world.sequence(4 + i, max_tokens=4) for i in range(7)])
    most = 0
    while world.engine.has_work:
        world.step()
        most = max(most, world.engine.stats().running)
    assert most == 3


def test_the_latest_of_the_lowest_priority_gives_way_and_comes_back() -> None:
    world = World(num_blocks=18, max_num_seqs=4)
    important = world.sequence(12, max_tokens=20, priority=0, arrival_s=5.0)
    early = world.sequence(13, max_tokens=20, priority=1, arrival_s=1.0)
    late = world.sequence(10, max_tokens=20, priority=1, arrival_s=2.0)
    world.add(important, early, late)
    preempted = [sequence for result in world.run() for sequence in result.preempted]
    assert set(preempted) == {late}
    assert late.num_preemptions == len(preempted)
    assert important.num_preemptions == early.num_preemptions == 0
    assert all(s.output_token_ids() == expected_output(s) for s in (important, early, late))


def test_a_preempted_sequence_is_reported_as_admitted_only_once() -> None:
    world = World(num_blocks=12, max_num_seqs=4)
    world.add(*[world.sequence(12 + i, max_tokens=20) for i in range(3)])
    results = world.run()
    admitted = [sequence.seq_id for result in results for sequence in result.admitted]
    assert sorted(admitted) == [1, 2, 3]
    assert any(result.preempted for result in results)


@pytest.mark.parametrize("scarce", ["seats", "blocks"])
def test_a_higher_priority_class_takes_the_place_of_a_lower_one(scarce: str) -> None:
    world = World(max_num_seqs=2 if scarce == "seats" else 8, num_blocks=64 if scarce == "seats" else 16)
    old = [world.sequence(20 + i, max_tokens=30, priority=5) for i in range(2)]
    world.add(*old)
    world.step()
    world.step()
    peer = world.sequence(22, max_tokens=1, priority=5)
    urgent = world.sequence(23, max_tokens=2, priority=0)
    world.add(peer, urgent)
    for _ in range(4):
        world.step()
    assert urgent.status is SequenceStatus.FINISHED
    assert (old[0].num_preemptions, old[1].num_preemptions) == (0, 1)
    world.run()
    assert all(s.output_token_ids() == expected_output(s) for s in (*old, peer, urgent))


def test_tenants_share_by_weight_and_not_by_number_of_requests() -> None:
    world = World(num_blocks=256, max_num_seqs=2)
    world.add(*[world.sequence([i] * 10, max_tokens=4, tenant="a") for i in range(40)])
    world.add(*[world.sequence([i + 100] * 10, max_tokens=4, tenant="b", weight=2.0) for i in range(20)])
    order: list[str] = []
    while len(order) < 27:
        order += [sequence.tenant for sequence in world.step().finished]
    assert order.count("b") == pytest.approx(18, abs=2)


def test_prompt_chunks_of_a_step_are_reported() -> None:
    world = World(max_num_batched_tokens=16)
    sequence = world.sequence(40, max_tokens=1)
    world.add(sequence)
    chunks = [result.prefill_chunks for result in world.run()]
    assert chunks == [((sequence, 0, 16),), ((sequence, 16, 16),), ()]


def test_equal_prompts_of_different_requests_are_computed_once() -> None:
    world = World(max_num_batched_tokens=16)
    first, second = world.sequence(41, max_tokens=1), world.sequence(41, max_tokens=1)
    world.add(first, second)
    world.run()
    assert second.num_cached_tokens == 40


def test_choices_that_score_their_prompt_do_not_wait_for_each_other() -> None:
    world = World()
    choices = [world.sequence(21, max_tokens=1, sampling={"prompt_logprobs": 0}) for _ in range(2)]
    world.add(*choices)
    world.run()
    assert [s.num_cached_tokens for s in choices] == [0, 0]


def test_a_runner_that_forgets_a_token_is_found_out() -> None:
    world = World()
    world.add(world.sequence(4))
    plan = world.scheduler.schedule()
    with pytest.raises(EngineError, match="1 tokens were to be drawn, 0 came back"):
        world.scheduler.commit(plan, StepOutput(sampled=()), 0.0, {})
