"""When the results of steps go out: at once, or several steps together."""

from __future__ import annotations

import pytest

from common.errors import ContextOverflow
from engine_worker.handoff import Add, Commands, Refused, StepReports
from engine_worker.step import StepResult
from engine_worker.step_limits import StepLimits
from engine_worker.step_loop import StepLoop
from tests.unit.engine_worker.worlds import World


def taken_together(reports: StepReports) -> list[list[int]]:
    """What a reader takes that comes whenever it is woken, as step numbers."""
    taken: list[list[int]] = []
    reports.on_report(lambda: taken.append([report.step for report in reports.take_all()]))
    return taken


def tokens_of_each_turn(interval: int, num_tokens: int) -> list[int]:
    """How many tokens a stream of ``num_tokens`` gets at each turn of the output stage."""
    world, turns = World(), []
    reports = StepReports(100, interval)

    def take() -> None:
        turns.append(sum(len(report.sampled) for report in reports.take_all()))
        loop.reports.all_out()

    reports.on_report(take)
    loop = StepLoop(world.engine, Commands(), reports, StepLimits(1.0, 60.0, 10.0), max_step_s=60.0)
    loop.commands.put(Add("r1", (world.sequence(5, request_id="r1", max_tokens=num_tokens),)))
    loop._obey()
    while world.engine.has_work:
        loop._report(world.engine.step(0.0))
    return turns


def test_each_step_goes_out_by_itself_unless_asked_otherwise() -> None:
    assert tokens_of_each_turn(1, 5) == [1, 1, 1, 1, 1]


def test_the_first_token_and_the_end_do_not_wait_for_others() -> None:
    assert tokens_of_each_turn(4, 11) == [1, 4, 4, 2]


def test_an_answer_of_one_token_goes_out_at_once() -> None:
    assert tokens_of_each_turn(50, 1) == [1]


@pytest.mark.parametrize("interval", [2, 3, 50])
def test_no_token_stays_behind(interval: int) -> None:
    assert sum(tokens_of_each_turn(interval, 20)) == 20


def test_a_refusal_and_a_failure_do_not_wait() -> None:
    reports = StepReports(100, 10)
    taken = taken_together(reports)
    reports.put(StepResult(step=1, t=0.0))
    reports.put(StepResult(step=2, t=0.0, failed=((World().sequence(3), "broken"),)))
    assert taken == [[1, 2]]
    reports = StepReports(100, 10)
    woken: list[bool] = []
    reports.on_report(lambda: woken.append(True))
    reports.put(Refused("r1", ContextOverflow("too long")))
    assert woken


def test_an_engine_that_may_not_go_on_before_reports_are_taken_has_them_taken() -> None:
    reports = StepReports(3, stream_interval=1000)
    taken = taken_together(reports)
    for step in range(1, 7):
        assert reports.wait_for_room(0.0)
        reports.put(StepResult(step=step, t=0.0))
    assert taken == [[1, 2, 3], [4, 5, 6]]
