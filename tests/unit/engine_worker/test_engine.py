"""The engine as a whole, over a runner that notices every misplaced slot."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import ContextOverflow
from common.events import FinishReason
from engine_worker.sequence import Sequence, SequenceStatus
from tests.unit.engine_worker.worlds import MAX_MODEL_LEN, World, expected_output


def test_sequence_runs_to_max_tokens() -> None:
    world = World()
    sequence = world.sequence(10, max_tokens=5)
    world.add(sequence)
    results = world.run()
    assert sequence.output_token_ids() == expected_output(sequence)
    assert sequence.finish_reason is FinishReason.LENGTH
    assert [r.finished for r in results if r.finished] == [(sequence,)]
    assert [t.token_id for r in results for t in r.sampled] == list(sequence.output_token_ids())


def test_single_token_prompt_and_exact_block_multiples_work() -> None:
    world = World()
    sequences = [world.sequence(n, max_tokens=9) for n in (1, 3, 4, 5, 8, 31, 32, 33)]
    world.add(*sequences)
    world.run()
    assert [s.output_token_ids() for s in sequences] == [expected_output(s) for s in sequences]


def test_context_length_ends_a_sequence() -> None:
    world = World()
    sequence = world.sequence(MAX_MODEL_LEN - 3, max_tokens=100)
    world.add(sequence)
    world.run()
    assert sequence.num_tokens == MAX_MODEL_LEN
    assert sequence.finish_reason is FinishReason.LENGTH


def test_eos_stops_without_and_stop_token_with_a_stop_reason() -> None:
    world = World()
    free = world.sequence(10, max_tokens=10)
    third = expected_output(free)[2]
    by_eos = world.sequence(10, max_tokens=10, sampling={"eos_token_ids": (third,)})
    by_stop = world.sequence(10, max_tokens=10, sampling={"stop_token_ids": (third,)})
    ignoring = world.sequence(10, max_tokens=10, sampling={"eos_token_ids": (third,), "ignore_eos": True})
    world.add(by_eos, by_stop, ignoring)
    world.run()
    assert (by_eos.num_output_tokens, by_eos.finish_reason, by_eos.stop_reason) == (3, FinishReason.STOP, None)
    assert (by_stop.num_output_tokens, by_stop.finish_reason, by_stop.stop_reason) == (3, FinishReason.STOP, third)
    assert ignoring.num_output_tokens == 10


def test_eos_below_min_tokens_does_not_stop() -> None:
    world = World()
    third = expected_output(world.sequence(10))[2]
    sequence = world.sequence(10, max_tokens=10, sampling={"eos_token_ids": (third,), "min_tokens": 3})
    world.add(sequence)
    world.run()
    assert sequence.num_output_tokens > 3


def test_max_tokens_zero_computes_the_prompt_and_draws_nothing() -> None:
    world = World(max_num_batched_tokens=16)
    sequence = world.sequence(40, max_tokens=0, sampling={"prompt_logprobs": 0})
    world.add(sequence)
    results = world.run()
    assert sequence.finish_reason is FinishReason.LENGTH
    assert not [t for r in results for t in r.sampled]
    starts = [s.start for r in results for s in r.prompt_logprobs]
    assert sum(len(s.logprobs) for r in results for s in r.prompt_logprobs) == 39
    assert starts[0] == 1


def test_prompt_scores_are_complete_and_never_repeated_despite_preemption_and_cache() -> None:
    world = World(num_blocks=16, max_num_batched_tokens=16, max_prefill_tokens_beside_decodes=8)
    warm = world.sequence(30, max_tokens=1)
    world.add(warm)
    world.run()
    scorer = world.sequence(30, max_tokens=20, sampling={"prompt_logprobs": 0}, arrival_s=2000.0)
    world.add(scorer)
    scored = [
        p for _ in range(2) for s in world.step().prompt_logprobs for p in range(s.start, s.start + len(s.logprobs))
    ]
    rival = world.sequence(20, max_tokens=44, priority=-1)
    world.add(rival)
    for result in world.run():
        scored += [p for s in result.prompt_logprobs for p in range(s.start, s.start + len(s.logprobs))]
    assert scored == list(range(1, 30))
    assert scorer.num_preemptions > 0
    assert scorer.output_token_ids() == expected_output(scorer)


def test_too_long_sequence_is_refused_before_anything_is_queued() -> None:
    world = World(num_blocks=8)
    fits, too_long = world.sequence(4), world.sequence(40)
    with pytest.raises(ContextOverflow, match="cannot fit"):
        world.add(fits, too_long)
    assert not world.engine.has_work


def test_cancel_frees_blocks_at_once_and_is_idempotent() -> None:
    world = World(max_num_seqs=2)
    running = world.sequence(10, request_id="a", max_tokens=50)
    waiting = [world.sequence(12, request_id="a", choice=i) for i in (1, 2)]
    other = world.sequence(14, request_id="b")
    world.add(running, *waiting, other)
    world.step()
    assert set(world.engine.cancel("a")) == {running, *waiting}
    world.engine.check_invariants()
    assert world.engine.cancel("a") == ()
    assert world.engine.cancel("unknown") == ()
    assert running.finish_reason is FinishReason.CANCELLED
    world.run()
    assert other.output_token_ids() == expected_output(other)
    assert world.engine.stats().kv_blocks_used == 0


def test_finish_ends_one_sequence_once() -> None:
    world = World()
    first, second = world.sequence(10, request_id="a"), world.sequence(11, request_id="a", choice=1)
    world.add(first, second)
    world.step()
    assert world.engine.finish(first, FinishReason.STOP, "END")
    assert not world.engine.finish(first, FinishReason.LENGTH)
    assert (first.finish_reason, first.stop_reason) == (FinishReason.STOP, "END")
    assert not world.engine.finish(world.sequence(3), FinishReason.STOP)
    world.run()
    assert second.output_token_ids() == expected_output(second)


def test_confined_failure_ends_only_its_sequence() -> None:
    world = World(fail=lambda sequence: sequence.request_id == "bad" and sequence.num_output_tokens == 2)
    bad, good = world.sequence(10, request_id="bad"), world.sequence(10, request_id="good")
    world.add(bad, good)
    results = world.run()
    assert [f for r in results for f in r.failed] == [(bad, "told to fail")]
    assert (bad.status, bad.finish_reason) == (SequenceStatus.FINISHED, None)
    assert good.output_token_ids() == expected_output(good)


def test_resumed_sequence_continues_as_if_nothing_had_happened() -> None:
    world = World()
    whole = world.sequence(21, max_tokens=12)
    output = expected_output(whole)
    resumed = world.sequence(21, max_tokens=12, output_token_ids=output[:7])
    world.add(resumed)
    world.run()
    assert resumed.output_token_ids() == output


def test_resumed_sequence_that_had_already_ended_is_reported_without_computing() -> None:
    world = World()
    output = expected_output(world.sequence(21, max_tokens=12))
    full = world.sequence(21, max_tokens=12, output_token_ids=output)
    stopped = world.sequence(21, max_tokens=12, output_token_ids=output[:4], sampling={"eos_token_ids": (output[3],)})
    world.add(full, stopped)
    result = world.step()
    assert result.finished == (full, stopped)
    assert (full.finish_reason, stopped.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)
    assert not world.engine.has_work
    assert world.runner.plans == []


def test_choices_share_their_prompt() -> None:
    world = World(max_num_batched_tokens=64)
    choices = [world.sequence(41, request_id="a", choice=i, max_tokens=3) for i in range(4)]
    world.add(*choices)
    world.run()
    assert [s.num_cached_tokens for s in choices] == [0, 40, 40, 40]
    assert world.engine.stats().prompt_tokens < 41 + 3 * 2
    assert all(s.output_token_ids() == expected_output(s) for s in choices)


def test_siblings_go_on_when_the_first_choice_is_gone() -> None:
    world = World(max_num_batched_tokens=16)
    choices = [world.sequence(41, request_id="a", choice=i, max_tokens=3) for i in range(3)]
    world.add(*choices)
    world.step()
    assert [s.status for s in choices[1:]] == [SequenceStatus.WAITING] * 2
    world.engine.finish(choices[0], FinishReason.CANCELLED)
    world.run()
    assert all(s.output_token_ids() == expected_output(s) for s in choices[1:])


def test_salt_and_adapter_separate_equal_prompts() -> None:
    world = World()
    for salt, adapter in (("", ""), ("x", ""), ("", "x"), ("x", "")):
        sequence = world.sequence(20, cache_salt=salt, adapter=adapter)
        world.add(sequence)
        world.run()
        assert sequence.output_token_ids() == expected_output(sequence)
    assert sequence.num_cached_tokens == 16
    assert world.engine.stats().prefix_cache_hits == 16


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    world = World()
    first = world.sequence(10, max_tokens=11)
    world.add(first)
    world.run()
    turn = world.sequence([*first.tokens[: first.num_tokens].tolist(), 1, 2, 3])
    world.add(turn)
    world.run()
    assert turn.num_cached_tokens == 20
    assert turn.output_token_ids() == expected_output(turn)


def test_stats_count_tokens_and_blocks() -> None:
    world = World()
    world.add(world.sequence(10, max_tokens=4), world.sequence(6, max_tokens=100))
    world.step()
    stats = world.engine.stats()
    assert (stats.running, stats.waiting, stats.steps) == (2, 0, 1)
    assert (stats.prompt_tokens, stats.generation_tokens) == (16, 2)
    assert stats.kv_blocks_used == 5
    assert stats.kv_usage == pytest.approx(5 / 64)


@st.composite
def _streams(draw: st.DrawFn) -> tuple[dict[str, int | bool], list[dict[str, int]], list[int]]:
    world = {
        "num_blocks": draw(st.integers(16, 40)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.integers(16, 28)),
        "max_prefill_tokens_beside_decodes": draw(st.integers(1, 28)),
        "long_prefill_token_threshold": draw(st.integers(1, 28)),
        "prefix_caching": draw(st.sampled_from([True, True, True, False])),
    }
    request = st.fixed_dictionaries(
        {
            "at": st.integers(0, 10),
            "prompt": st.integers(1, 40),
            "prefix": st.integers(0, 1),
            "max_tokens": st.integers(0, 24),
            "n": st.integers(1, 3),
            "priority": st.integers(0, 1),
            "tenant": st.integers(0, 2),
            "scores": st.sampled_from([0, 0, 0, 1]),
        }
    )
    return world, draw(st.lists(request, min_size=1, max_size=9)), draw(st.lists(st.integers(0, 60), max_size=3))


@settings(max_examples=200, deadline=None)
@given(_streams())
def test_any_stream_of_requests_gives_what_each_gives_alone(
    stream: tuple[dict[str, int | bool], list[dict[str, int]], list[int]],
) -> None:
    options, requests, cancels = stream
    world = World(**options)  # type: ignore[arg-type]  # drawn names and values
    everything: list[Sequence] = []
    gone: set[str] = set()
    step = 0
    pending = list(enumerate(requests))
    while pending or world.engine.has_work:
        arriving = [item for item in pending if item[1]["at"] <= step]
        pending = [item for item in pending if item[1]["at"] > step]
        for number, request in arriving:
            # Blocks repeat within a prompt and between prompts: only their place tells them apart.
            prompt = [(i // 2 * (request["prefix"] + 1)) % 3 for i in range(request["prompt"])]
            choices = [
                world.sequence(
                    prompt,
                    max_tokens=request["max_tokens"],
                    request_id=f"q{number}",
                    choice=k,
                    priority=request["priority"],
                    tenant=str(request["tenant"]),
                    sampling={"prompt_logprobs": 0} if request["scores"] else {},
                )
                for k in range(request["n"])
            ]
            everything += choices
            world.add(*choices)
        world.step()
        if step in cancels:
            gone |= {s.request_id for s in world.engine.cancel(f"q{step % len(requests)}")}
        step += 1
        assert step < 3000, "the engine makes no progress"
    for sequence in everything:
        assert sequence.status is SequenceStatus.FINISHED
        output = sequence.output_token_ids()
        expected = expected_output(sequence)
        if sequence.finish_reason is FinishReason.CANCELLED:
            assert sequence.request_id in gone
            assert output == expected[: len(output)]
        else:
            assert output == expected
            assert sequence.num_scored_tokens == sequence.num_prompt_tokens
    assert world.engine.stats().kv_blocks_used == 0
