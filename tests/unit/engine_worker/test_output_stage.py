"""The output stage against every answer of the log."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import EngineError, LogUnavailable
from common.events import (
    CancelReason,
    ChoiceFinished,
    Ended,
    Failed,
    FinishReason,
    Milestone,
    Recorded,
    Started,
    Tokens,
)
from common.request_state import fold
from engine_worker import output_stage
from engine_worker.handoff import Drop, Refused
from tests.unit.engine_worker.text_world import Inside, MemoryLog, request, visible


def state_of(log: MemoryLog, request_id: str = "0-r1"):
    return fold([Recorded(n, event) for n, event in enumerate(log.streams[request_id], start=1)])


async def undisturbed(engine_request=None) -> list:
    inside = Inside()
    inside.own(engine_request or request())
    await inside.run()
    return inside.log.streams["0-r1"]


async def test_a_step_of_many_requests_is_one_append() -> None:
    inside = Inside()
    for i in range(5):
        inside.own(request(f"0-r{i}", prompt=(i + 1, 2)))
    await inside.write()
    await inside.turn()
    assert [len(call) for call in inside.log.calls] == [5, 5]
    assert all(isinstance(item.events[0], Tokens) for item in inside.log.calls[1])


async def test_steps_are_coalesced_while_the_log_is_slow() -> None:
    inside = Inside()
    inside.own(request(max_tokens=10))
    await inside.write()
    inside._obey()
    for _ in range(4):
        inside.reports.put(inside.world.step())
    await inside.write()
    (tokens,) = [event for event in inside.log.streams["0-r1"] if isinstance(event, Tokens)]
    assert len(tokens.token_ids) == 4


async def test_a_lost_tail_is_written_again_from_memory() -> None:
    inside = Inside()
    inside.own(request(max_tokens=10))
    await inside.write()
    for _ in range(5):
        await inside.turn()
    before = list(inside.log.streams["0-r1"])
    del inside.log.streams["0-r1"][2:]
    await inside.run()
    assert inside.log.streams["0-r1"][: len(before)] == before
    assert visible(inside.log.streams["0-r1"]) == visible(await undisturbed(request(max_tokens=10)))


async def test_a_repeated_append_adds_nothing() -> None:
    inside = Inside()
    inside.own(request())
    await inside.write()
    await inside.turn()
    repeated = await inside.log.append(inside.log.calls[-1])
    assert [outcome.status.value for outcome in repeated] == ["duplicate"]
    await inside.run()
    assert visible(inside.log.streams["0-r1"]) == visible(await undisturbed())


async def test_a_fenced_request_is_dropped_silently() -> None:
    inside = Inside()
    inside.own(request("0-r1"))
    inside.own(request("0-r2", prompt=(4, 5)))
    await inside.write()
    await inside.turn()
    length = len(inside.log.streams["0-r1"])
    inside.log.epochs["0-r1"] = 2
    await inside.run()
    assert len(inside.log.streams["0-r1"]) == length
    assert state_of(inside.log, "0-r2").is_terminal
    assert inside.metrics.fenced._value.get() == 1


async def test_a_cancel_mark_ends_the_request_with_exact_usage() -> None:
    inside = Inside()
    inside.own(request(n=2, max_tokens=50))
    await inside.write()
    for _ in range(4):
        await inside.turn()
    inside.log.cancels["0-r1"] = CancelReason.CLIENT_DISCONNECTED
    await inside.run(limit=3)
    state = state_of(inside.log)
    assert state.cancelled is CancelReason.CLIENT_DISCONNECTED
    assert {choice.finish_reason for choice in state.choices.values()} == {FinishReason.CANCELLED}
    assert state.usage is not None
    assert state.usage.completion_tokens == sum(len(choice.token_ids) for choice in state.choices.values()) >= 8
    assert inside.stage.num_sequences == 0


async def test_cancelling_twice_or_after_the_end_changes_nothing() -> None:
    inside = Inside()
    inside.own(request(max_tokens=50))
    await inside.write()
    await inside.turn()
    inside.stage.cancel("0-r1", CancelReason.API)
    inside.stage.cancel("0-r1", CancelReason.DEADLINE)
    await inside.run()
    inside.stage.cancel("0-r1", CancelReason.API)
    inside.stage.cancel("0-unknown", CancelReason.API)
    assert [type(e) for e in inside.log.streams["0-r1"]].count(Ended) == 1
    assert state_of(inside.log).cancelled is CancelReason.API


async def test_a_failing_sequence_fails_its_request_and_no_other() -> None:
    inside = Inside(fail=lambda sequence: sequence.request_id == "0-r1" and sequence.num_output_tokens == 3)
    inside.own(request("0-r1", n=2))
    inside.own(request("0-r2", prompt=(9, 9)))
    await inside.run()
    failure = state_of(inside.log, "0-r1").failure
    assert failure is not None
    assert (failure.code, failure.retryable) == (EngineError.code, True)
    assert failure.usage.completion_tokens == 6
    assert state_of(inside.log, "0-r2").usage is not None


async def test_a_request_that_the_engine_refuses_fails_in_the_log() -> None:
    inside = Inside()
    inside.own(request())
    inside.reports.put(Refused("0-r1", EngineError("too large")))
    await inside.write()
    failure = state_of(inside.log).failure
    assert failure is not None
    assert failure.message == "too large"


async def test_an_outage_delays_but_loses_and_reorders_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_stage, "_FIRST_BACKOFF_S", 0.001)
    inside = Inside()
    writer = asyncio.create_task(inside.stage.run())
    inside.own(request(max_tokens=10))
    inside.reports.on_report(inside.stage.wake)
    inside._obey()
    while inside.world.engine.has_work:
        inside.log.outages = 2
        inside.reports.put(inside.world.step())
        await asyncio.sleep(0)
    async with asyncio.timeout(120):
        while inside.stage.live:
            inside.stage.room_changed.clear()
            await inside.stage.room_changed.wait()
    inside.stage.stop()
    await writer
    assert state_of(inside.log).usage == (await undisturbed(request(max_tokens=10)))[-1].usage
    assert inside.metrics.log_errors._value.get() >= 2


async def test_the_last_write_of_a_stopping_worker_does_not_wait_for_ever() -> None:
    inside = Inside()
    inside.own(request())
    inside.log.outages = 1000
    with pytest.raises(LogUnavailable):
        await inside.write()


async def test_a_newer_epoch_replaces_the_older_one_of_the_same_request() -> None:
    inside = Inside()
    inside.own(request(max_tokens=10))
    await inside.write()
    await inside.turn()
    logged = list(inside.log.streams["0-r1"])
    inside.own(request(max_tokens=10), epoch=2, events=logged)
    inside.log.epochs["0-r1"] = 2
    await inside.run()
    assert visible(inside.log.streams["0-r1"])[-1] == visible(await undisturbed(request(max_tokens=10)))[-1]
    assert state_of(inside.log).epoch == 2


async def test_handing_over_writes_what_is_there_and_releases() -> None:
    inside = Inside()
    inside.own(request(max_tokens=50))
    await inside.write()
    await inside.turn()
    inside._obey()
    inside.reports.put(inside.world.step())
    await inside.stage.hand_over()
    assert inside.log.released == ["0-r1"]
    last = inside.log.streams["0-r1"][-2:]
    assert {type(event) for event in last} == {Tokens, Milestone}
    assert not inside.stage.live


async def test_a_stop_string_ends_the_sequence_in_the_engine() -> None:
    whole = await undisturbed(request(max_tokens=60))
    text = "".join(event.text for event in whole if isinstance(event, Tokens))
    stop = text[20:23]
    inside = Inside()
    inside.own(request(max_tokens=60, stop=(stop,)))
    await inside.run()
    finished = next(e for e in inside.log.streams["0-r1"] if isinstance(e, ChoiceFinished))
    assert (finished.finish_reason, finished.stop_reason) == (FinishReason.STOP, stop)
    state = state_of(inside.log)
    assert state.choice(0).text == text[: text.index(stop)]
    assert state.usage is not None
    assert state.usage.completion_tokens == len(state.choice(0).token_ids) < 60


async def test_preemption_and_chunks_show_as_milestones() -> None:
    inside = Inside(num_blocks=24, prefix_caching=False)
    for i in range(3):
        inside.own(request(f"0-r{i}", prompt=tuple(range(i, i + 33)), max_tokens=30))
    await inside.run()
    seen = {event.what for stream in inside.log.streams.values() for event in stream if isinstance(event, Milestone)}
    assert seen == {"prefill_chunk", "preempted", "resumed"}
    assert inside.metrics.wasted_tokens._value.get() > 33
    for i in range(3):
        alone = Inside()
        alone.own(request("0-r1", prompt=tuple(range(i, i + 33)), max_tokens=30))
        await alone.run()
        assert state_of(inside.log, f"0-r{i}").choice(0) == state_of(alone.log).choice(0)


async def test_cached_prompt_tokens_are_counted_once_a_prompt() -> None:
    inside = Inside()
    inside.own(request("0-r1", prompt=tuple(range(40)), max_tokens=2))
    await inside.run()
    inside.own(request("0-r2", prompt=tuple(range(40)), n=3, max_tokens=2))
    await inside.run()
    usage = state_of(inside.log, "0-r2").usage
    assert usage is not None
    assert 0 < usage.cached_tokens < 40
    assert (usage.prompt_tokens, usage.completion_tokens) == (40, 6)


async def test_every_request_ends_with_one_terminal_event_and_starts_with_started() -> None:
    inside = Inside()
    for i in range(12):
        inside.own(request(f"0-r{i}", prompt=(i, i + 1), n=1 + i % 3, max_tokens=1 + i))
    await inside.run()
    for stream in inside.log.streams.values():
        assert isinstance(stream[0], Started)
        assert sum(isinstance(event, Ended | Failed) for event in stream) == 1
        assert isinstance(stream[-1], Ended)
    assert not inside.stage.live


async def test_a_request_that_is_over_leaves_the_engine_at_once() -> None:
    inside = Inside()
    inside.own(request(max_tokens=50))
    await inside.write()
    await inside.turn()
    inside.stage.cancel("0-r1", CancelReason.API)
    assert inside.commands.get() == Drop("0-r1")
