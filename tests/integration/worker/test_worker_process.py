"""Worker processes killed, frozen, stopped and broken: every request ends once, token for token as it should."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from common.events import CancelReason, Ended, FinishReason, Grammar, Milestone, Started
from common.request_state import fold
from common.transport import CancelOutcome
from tests.integration.worker.conftest import LEASE_S, Fleet, assert_exact
from tests.servers import Server, running

pytestmark = pytest.mark.e2e

STEPS = ("open", "acquire", "ensure_groups", "register")  # of the start, with the log


def owners(events) -> list[str]:
    return [item.event.worker for item in events if isinstance(item.event, Started)]


async def test_requests_of_all_kinds_are_answered_exactly(fleet: Fleet) -> None:
    await fleet.start("w1", step_s=0.001)
    made = [
        await fleet.submit(1, max_tokens=20),
        await fleet.submit(2, n=3, max_tokens=9),
        await fleet.submit(3, max_tokens=60, stop=("b c", "🦊x", "字é", "a")),
        await fleet.submit(4, max_tokens=30, eos_token_ids=tuple(range(300, 400))),
        await fleet.submit(5, max_tokens=3, grammar=Grammar(kind="regex", source="a")),
    ]
    for one in made:
        await assert_exact(one, await fleet.events(one))


async def test_a_killed_workers_requests_are_continued_token_for_token(fleet: Fleet) -> None:
    await fleet.start("w1", step_s=0.1)
    made = [await fleet.submit(seed, max_tokens=60, stop=("a🦊",), n=1 + seed % 2) for seed in range(4)]
    for one in made:
        await fleet.until_length(one, 10)
    fleet.signal("w1", signal.SIGKILL)
    await fleet.start("w2", step_s=0.001)
    for one in made:
        events = await fleet.events(one)
        state = await assert_exact(one, events)
        assert owners(events) == ["w1", "w2"]
        assert state.takeovers == 1


async def test_a_frozen_worker_that_wakes_up_cannot_write_any_more(fleet: Fleet) -> None:
    await fleet.start("w1", step_s=0.05)
    made = await fleet.submit(1, max_tokens=150)
    await fleet.until_length(made, 10)
    fleet.signal("w1", signal.SIGSTOP)
    await fleet.start("w2", step_s=0.02)

    async def is_taken_over() -> bool:
        return len(owners(await fleet.reading.read_range(made.request_id, after=0))) == 2

    await fleet.until(is_taken_over)
    fleet.signal("w1", signal.SIGCONT)
    events = await fleet.events(made)
    await assert_exact(made, events)
    assert owners(events) == ["w1", "w2"]

    async def is_told_of() -> bool:
        return "no longer ours" in fleet.log_of("w1")

    await fleet.until(is_told_of)
    assert fleet.workers["w1"].poll() is None, "the worker that slept goes on with other work"
    again = await fleet.submit(2, max_tokens=5)
    await assert_exact(again, await fleet.events(again))


async def test_sigterm_finishes_what_runs_and_exits_cleanly(fleet: Fleet) -> None:
    await fleet.start("w1", step_s=0.05)
    made = await fleet.submit(1, max_tokens=40)
    await fleet.until_length(made, 5)
    fleet.signal("w1", signal.SIGTERM)
    assert await fleet.exit_code("w1") == 0
    events = await fleet.events(made)
    await assert_exact(made, events)
    assert owners(events) == ["w1"]
    assert await fleet.registry.workers() == []


async def test_handover_gives_running_requests_to_others_at_once(fleet: Fleet) -> None:
    await fleet.start("w1", step_s=0.2, flags=("--handover",))
    made = await fleet.submit(1, max_tokens=300)
    await fleet.until_length(made, 5)
    await fleet.start("w2", step_s=0.001)
    fleet.signal("w1", signal.SIGTERM)
    assert await fleet.exit_code("w1") == 0
    events = await fleet.events(made)
    await assert_exact(made, events)
    assert owners(events) == ["w1", "w2"]


@pytest.mark.parametrize("signals", [[signal.SIGUSR1], [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR1]], ids=str)
async def test_sigusr1_hands_over_at_once_whatever_the_setting_says(
    fleet: Fleet, signals: list[signal.Signals]
) -> None:
    await fleet.start("w1", step_s=0.2, worker_drain_timeout_s=100)
    made = await fleet.submit(1, max_tokens=300)
    await fleet.until_length(made, 5)
    await fleet.start("w2", step_s=0.001)
    for number in signals:
        fleet.signal("w1", number)
        await asyncio.sleep(0.1)
    assert await fleet.exit_code("w1") == 0
    events = await fleet.events(made)
    await assert_exact(made, events)
    assert owners(events) == ["w1", "w2"]
    handed = [item.event.what for item in events if isinstance(item.event, Milestone)]
    assert "handed_over" in handed


async def test_the_rest_is_handed_over_when_draining_takes_too_long(fleet: Fleet) -> None:
    await fleet.start("w1", step_s=0.05, worker_drain_timeout_s=0.3)
    made = await fleet.submit(1, max_tokens=100)
    await fleet.until_length(made, 5)
    fleet.signal("w1", signal.SIGTERM)
    assert await fleet.exit_code("w1") == 0
    await fleet.start("w2", step_s=0.001)
    events = await fleet.events(made)
    await assert_exact(made, events)
    assert owners(events) == ["w1", "w2"]


async def test_a_second_sigterm_ends_the_process_at_once(fleet: Fleet) -> None:
    await fleet.start("w1", step_s=0.2)
    made = await fleet.submit(1, max_tokens=300)
    await fleet.until_length(made, 5)
    fleet.signal("w1", signal.SIGTERM)

    async def is_draining() -> bool:
        return "draining" in fleet.log_of("w1")

    await fleet.until(is_draining)
    fleet.signal("w1", signal.SIGTERM)
    assert await fleet.exit_code("w1") == 1  # 0 once it has drained


async def test_a_name_that_a_live_worker_has_is_refused_in_one_line(fleet: Fleet) -> None:
    await fleet.start("w1", step_s=0.02)
    first = fleet.workers["w1"]
    made = await fleet.submit(1, max_tokens=30)
    await fleet.start("w1")  # the name is live: that of the first
    second, fleet.workers["w1"] = fleet.workers["w1"], first
    assert await asyncio.to_thread(second.wait, 60) == 1
    log = fleet.log_of("w1")
    assert "worker_name: a live worker has the name 'w1' already; give this one another (--worker-name)" in log
    assert "Traceback" not in log
    await assert_exact(made, await fleet.events(made))
    assert first.poll() is None


async def test_a_worker_that_waits_for_the_log_can_be_stopped(fleet: Fleet) -> None:
    fleet.spawn("w1", redis_url="redis://127.0.0.1:1/0")

    async def waits() -> bool:
        return "waiting for the log" in fleet.log_of("w1")

    await fleet.until(waits, 60)
    fleet.signal("w1", signal.SIGTERM)
    assert await fleet.exit_code("w1", 30) == 0


async def test_a_worker_starts_however_often_the_log_is_away_meanwhile(fleet: Fleet) -> None:
    await fleet.start("w1", step_s=0.001, fake_log_away=1)
    made = await fleet.submit(1, max_tokens=5)
    await assert_exact(made, await fleet.events(made))
    waits = [line for line in fleet.log_of("w1").splitlines() if "waiting for the log" in line]
    assert [sum(f"away at {step}" in line for line in waits) for step in STEPS] == [1] * len(STEPS)


async def test_an_idle_worker_whose_log_is_gone_can_be_stopped(fleet: Fleet) -> None:
    with running(Server(fsync="everysec")) as server:
        fleet.spawn("w1", redis_url=server.url)

        async def is_ready() -> bool:
            return '"event":"ready"' in fleet.log_of("w1")

        await fleet.until(is_ready, 60)
    fleet.signal("w1", signal.SIGTERM)
    assert await fleet.exit_code("w1", 60) == 0


async def test_a_failing_engine_gives_its_lease_up_at_once(fleet: Fleet) -> None:
    await fleet.start("w1", step_s=0.01, fake_fail_at=20, lease_ttl_s=30)
    made = await fleet.submit(1, max_tokens=60)
    assert await fleet.exit_code("w1") == 1
    log = fleet.log_of("w1")
    assert "fell off the bus" in log
    assert made.request_id in log
    await fleet.start("w2", step_s=0.001)
    events = await fleet.events(made)
    await assert_exact(made, events)
    assert owners(events) == ["w1", "w2"]


async def test_a_stuck_engine_loses_its_requests_and_the_process_ends(fleet: Fleet) -> None:
    await fleet.start("w1", step_s=0.01, fake_hang_at=20, max_step_s=0.5)
    made = await fleet.submit(1, max_tokens=60)
    await fleet.until_length(made, 5)
    await fleet.start("w2", step_s=0.001)
    events = await fleet.events(made)
    await assert_exact(made, events)
    assert await fleet.exit_code("w1") == 1
    assert "stuck" in fleet.log_of("w1")


async def test_cancelling_frees_the_place_within_a_moment(fleet: Fleet) -> None:
    await fleet.start("w1", step_s=0.02)
    made = await fleet.submit(1, max_tokens=250)
    await fleet.until_length(made, 5)
    assert await fleet.submission.cancel(made.request_id, CancelReason.API, "test") is CancelOutcome.ASKED
    events = await fleet.events(made)
    state = fold(events)
    assert state.cancelled is CancelReason.API
    assert state.choice(0).finish_reason is FinishReason.CANCELLED
    assert state.usage is not None
    assert state.usage.completion_tokens == len(state.choice(0).token_ids) < 250

    async def is_idle() -> bool:
        (record,) = await fleet.registry.workers()
        return (record.stats.get("running"), record.stats.get("kv_usage")) == (0, 0)

    await fleet.until(is_idle)


async def test_the_deadline_ends_a_running_request(fleet: Fleet) -> None:
    await fleet.start("w1", step_s=0.02)
    made = await fleet.submit(1, max_tokens=250, deadline_s=time.time() + 3.0)
    events = await fleet.events(made)
    assert isinstance(events[-1].event, Ended)
    assert events[-1].event.cancelled is CancelReason.DEADLINE
    assert len(fold(events).choice(0).token_ids) > 3


async def test_a_server_that_dies_and_comes_back_loses_nothing(fleet: Fleet, server) -> None:
    await fleet.start("w1", step_s=0.02)
    made = await fleet.submit(1, max_tokens=100)
    await fleet.until_length(made, 10)
    await asyncio.sleep(1.2)  # everysec: what clients saw is on disk
    server.kill()
    await asyncio.sleep(2 * LEASE_S)
    server.start()
    events = await fleet.events(made)
    await assert_exact(made, events)


async def test_a_worker_takes_no_more_than_its_seats(fleet: Fleet) -> None:
    await fleet.start("w1", step_s=0.02)
    made = [await fleet.submit(seed, max_tokens=80) for seed in range(40)]
    await fleet.until_length(made[0], 3)
    seen: list[dict[str, float]] = []

    async def is_full() -> bool:
        (record,) = await fleet.registry.workers()
        seen.append(record.stats)
        return record.stats.get("running") == 16

    await fleet.until(is_full)
    assert max(stats.get("requests", 0) for stats in seen) == 16
    for one in made:
        await assert_exact(one, await fleet.events(one))


async def test_an_urgent_request_gets_a_seat_at_a_full_worker(fleet: Fleet) -> None:
    await fleet.start("w1", step_s=0.02)
    made = [await fleet.submit(seed, max_tokens=250) for seed in range(20)]
    await fleet.until_length(made[0], 3)
    urgent = await fleet.submit(99, max_tokens=5, priority=-1)
    answer = await fleet.events(urgent)
    await assert_exact(urgent, answer)
    others = [await fleet.events(one) for one in made]
    for one, events in zip(made, others, strict=True):
        await assert_exact(one, events)
    assert answer[-1].event.t < min(events[-1].event.t for events in others)  # it waited for none of them to end
    milestones = [item.event.what for events in others for item in events if isinstance(item.event, Milestone)]
    assert "preempted" in milestones
