"""The engine thread: commands in, reports out, bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from common.errors import ContextOverflow
from engine_worker.handoff import Add, Commands, Drop, Finish, Halt, Refused, StepReports
from engine_worker.step import StepResult
from engine_worker.step_limits import StepLimits
from engine_worker.step_loop import StepLoop
from tests.unit.engine_worker.worlds import MAX_MODEL_LEN, World


@contextmanager
def running(world: World, limit: int = 1000, slack: float = 10.0) -> Iterator[StepLoop]:
    loop = StepLoop(world.engine, Commands(), StepReports(limit), StepLimits(1.0, 60.0, slack), max_step_s=60.0)
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        yield loop
    finally:
        loop.commands.put(Halt())
        loop.reports.take_all()
        thread.join(120)
        assert not thread.is_alive()


def collect(loop: StepLoop, enough, timeout_s: float = 120.0) -> list:
    reports: list = []
    deadline = time.monotonic() + timeout_s
    while not enough(reports):
        assert time.monotonic() < deadline, reports
        reports += loop.reports.take_all()
        time.sleep(0.002)
    return reports


def finished(reports: list) -> list[str]:
    return [s.request_id for r in reports if isinstance(r, StepResult) for s in r.finished]


def test_runs_what_is_added_to_its_end() -> None:
    world = World()
    with running(world) as loop:
        loop.commands.put(Add("r1", (world.sequence(5, request_id="r1"),)))
        reports = collect(loop, finished)
    tokens = [sampled.token_id for report in reports for sampled in report.sampled]
    assert len(tokens) == 8
    assert loop.stats.running == 0


def test_a_request_that_cannot_fit_is_refused_and_the_loop_goes_on() -> None:
    world = World()
    with running(world) as loop:
        loop.commands.put(Add("big", (world.sequence(MAX_MODEL_LEN + 1, request_id="big"),)))
        loop.commands.put(Add("r1", (world.sequence(5, request_id="r1"),)))
        reports = collect(loop, finished)
    (refused,) = [report for report in reports if isinstance(report, Refused)]
    assert refused.request_id == "big"
    assert isinstance(refused.error, ContextOverflow)


def test_dropped_and_finished_sequences_stop_at_the_next_step() -> None:
    world = World()
    with running(world) as loop:
        first, second = (world.sequence(i + 3, request_id=f"r{i}", max_tokens=200) for i in range(2))
        loop.commands.put(Add("r0", (first,)))
        loop.commands.put(Add("r1", (second,)))
        collect(loop, lambda reports: len(reports) > 2)
        loop.commands.put(Drop("r0"))
        loop.commands.put(Drop("unknown"))
        loop.commands.put(Finish(second, "stop"))
        loop.commands.put(Finish(second, "stop"))
        deadline = time.monotonic() + 120
        while loop.stats.running and time.monotonic() < deadline:
            time.sleep(0.002)
        assert loop.stats.running == 0
        assert loop.stats.kv_blocks_used == 0


def test_a_full_hand_off_pauses_the_engine_until_there_is_room() -> None:
    world = World()
    with running(world, limit=3) as loop:
        loop.commands.put(Add("r1", (world.sequence(5, request_id="r1", max_tokens=100),)))
        deadline = time.monotonic() + 120
        while len(loop.reports) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(loop.reports) == 3
        count, _ = loop.progress.latest
        while loop.progress.latest[0] == count:  # a paused loop still gives signs of life
            assert time.monotonic() < deadline
            time.sleep(0.01)
        reports = collect(loop, finished)
    assert sum(len(report.sampled) for report in reports) == 100


def test_what_the_engine_raises_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    def broken(plan):
        raise RuntimeError("device lost")

    monkeypatch.setattr(world.runner, "execute", broken)
    loop = StepLoop(world.engine, Commands(), StepReports(10), StepLimits(1.0, 60.0, 10.0), max_step_s=60.0)
    loop.commands.put(Add("r1", (world.sequence(5),)))
    with pytest.raises(RuntimeError, match="device lost"):
        loop.run()


def test_what_is_let_out_is_waited_for_until_it_is_out() -> None:
    reports = StepReports(10)
    reports.on_report(lambda: threading.Thread(target=reports.all_out).start())
    reports.put_and_let_out(StepResult(step=1, t=0.0), timeout_s=120.0)
    assert [report.step for report in reports.take_all()] == [1]


def test_what_nobody_lets_out_is_waited_for_in_vain() -> None:
    reports = StepReports(10)
    reports.all_out()  # of an earlier one
    reports.put_and_let_out(StepResult(step=1, t=0.0), timeout_s=0.01)
    assert [report.step for report in reports.take_all()] == [1]


def test_each_step_is_announced_with_the_time_that_steps_like_it_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    world, announced = World(), []
    execute = world.runner.execute

    def watched(plan):
        announced.append(loop.progress.latest[1])
        return execute(plan)

    monkeypatch.setattr(world.runner, "execute", watched)
    with running(world, slack=1e-9) as loop:  # whatever a step takes, the next may take the least that is allowed
        loop.commands.put(Add("r1", (world.sequence(70, request_id="r1", max_tokens=100),)))
        collect(loop, finished)
    assert announced[0] == 60.0, "nothing is known yet"
    assert announced[-1] == 1.0
    assert set(announced) == {1.0, 60.0}
