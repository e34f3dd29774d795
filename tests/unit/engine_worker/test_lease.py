"""The lease lives as long as the step loop moves, and no longer."""

from __future__ import annotations

import threading
import time

import pytest

from common.errors import Fenced, LogUnavailable
from common.telemetry.metrics import WorkerMetrics
from engine_worker.handoff import Progress
from engine_worker.lease import LeaseKeeper


class FakeLease:
    """Counts renewals; ``errors`` are raised by the next ones."""

    worker = "w"
    ttl_s = 0.08

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.renewals = 0
        self.is_released = False
        self.is_closed = False

    def renew(self) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.renewals += 1

    def release(self) -> None:
        self.is_released = True

    def close(self) -> None:
        self.is_closed = True


def keeper(lease: FakeLease, progress: Progress, lost: list[str], bound_s: float = 60.0) -> LeaseKeeper:
    return LeaseKeeper(lease, progress, WorkerMetrics("m"), bound_s, lost.append)


def wait_until(condition, timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def test_renews_while_the_loop_moves_and_releases_at_the_end() -> None:
    lease, lost = FakeLease(), []
    held = keeper(lease, Progress(60.0), lost)
    held.acquire(1.0)
    wait_until(lambda: lease.renewals > 3)
    held.stop(release=True)
    assert lease.is_released
    assert lease.is_closed
    assert lost == []


def test_a_stuck_loop_loses_the_lease() -> None:
    lease, lost = FakeLease(), []
    held = keeper(lease, Progress(0.05), lost, bound_s=0.05)
    held.acquire(1.0)
    wait_until(lambda: bool(lost))
    renewals = lease.renewals
    time.sleep(0.1)
    assert lease.renewals == renewals
    assert "stuck" in lost[0]
    assert lease.is_released, "others need not wait until it has run out"
    held.stop(release=False)


def test_a_busy_loop_that_announced_it_keeps_the_lease() -> None:
    lease, lost, progress = FakeLease(), [], Progress(0.05)
    stop = threading.Event()

    def loop() -> None:
        progress.announce(30.0)  # a long step
        stop.wait()

    thread = threading.Thread(target=loop)
    thread.start()
    held = keeper(lease, progress, lost)
    held.acquire(1.0)
    wait_until(lambda: lease.renewals > 8)
    stop.set()
    thread.join()
    held.stop(release=True)
    assert lost == []


def test_another_incarnation_ends_the_worker() -> None:
    lease, lost = FakeLease(), []
    held = keeper(lease, Progress(60.0), lost)
    held.acquire(1.0)
    lease.errors.append(Fenced("another incarnation"))
    wait_until(lambda: bool(lost))
    assert lost == ["another incarnation"]
    held.stop(release=False)


def test_an_outage_is_sat_out() -> None:
    lease, lost = FakeLease(), []
    held = keeper(lease, Progress(60.0), lost)
    held.acquire(1.0)
    lease.errors += [LogUnavailable("away")] * 3
    wait_until(lambda: lease.renewals > 3)
    held.stop(release=True)
    assert lost == []


class UntilRenewed:
    """Time that passes while the keeper waits, and only then; it is over with the second renewal."""

    def __init__(self, lease: FakeLease) -> None:
        self._lease = lease
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return self._lease.renewals > 1


def test_after_a_failure_it_is_tried_again_before_others_have_looked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = FakeLease()
    lease.ttl_s = 2.0
    held = keeper(lease, Progress(60.0), [])
    lease.renew()
    lease.errors.append(LogUnavailable("away"))
    time_of_keeper = UntilRenewed(lease)
    monkeypatch.setattr("engine_worker.lease.time", time_of_keeper)
    monkeypatch.setattr(held, "_stopped", time_of_keeper)
    held._run()
    assert lease.renewals == 2
    assert time_of_keeper.now <= 0.5 + 0.25, "a quarter of a lease and a bit: two ordinary intervals would be a half"


def test_the_lease_of_a_dead_predecessor_is_waited_for() -> None:
    lease, lost = FakeLease(Fenced("old one"), Fenced("old one")), []
    held = keeper(lease, Progress(60.0), lost)
    held.acquire(5.0)
    assert lease.renewals >= 1
    held.stop(release=True)


def test_a_name_in_use_is_refused_in_the_end() -> None:
    held = keeper(FakeLease(*[Fenced("in use")] * 100), Progress(60.0), [])
    with pytest.raises(Fenced):
        held.acquire(0.05)


def test_a_loop_that_was_only_slow_has_its_lease_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_worker.stall_clock.StallClock.look", lambda _, elapsed_s: elapsed_s)
    monkeypatch.setattr("engine_worker.stall_watch._CERTAIN", 1e9)
    lease, lost, progress, stalls = FakeLease(), [], Progress(0.05), []
    held = keeper(lease, progress, lost)
    held.on_stall = stalls.append
    held.acquire(1.0)
    wait_until(lambda: lease.is_released)
    renewals = lease.renewals
    time.sleep(0.05)
    assert lease.renewals == renewals, "others take over"
    progress.announce(60.0)
    wait_until(lambda: lease.renewals > renewals)
    wait_until(lambda: stalls == [True, False])
    held.stop(release=True)
    assert lost == []
