"""What counts against a loop that gives no sign of life, and what follows from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from engine_worker.handoff import Progress
from engine_worker.stall_clock import StallClock
from engine_worker.stall_watch import StallWatch, Verdict

LOOK_S = 0.1


class TellingClock(StallClock):
    """Counts as told."""

    share = 1.0

    def begin(self) -> None:
        pass

    def look(self, elapsed_s: float) -> float:
        return self.share * elapsed_s


def looks(watch: StallWatch, count: int) -> list[Verdict]:
    return [watch.look(LOOK_S, LOOK_S) for _ in range(count)]


def test_a_loop_without_a_sign_of_life_is_suspected_and_then_given_up() -> None:
    watch = StallWatch(Progress(1.0), 60.0, TellingClock())
    verdicts = looks(watch, 60)
    assert [verdicts.index(one) for one in (Verdict.SUSPECT, Verdict.STUCK)] == sorted(
        [verdicts.index(Verdict.SUSPECT), verdicts.index(Verdict.STUCK)]
    )
    assert verdicts.index(Verdict.SUSPECT) in (10, 11, 12)
    assert verdicts.index(Verdict.STUCK) in (40, 41, 42)


def test_a_sign_of_life_clears_it() -> None:
    progress = Progress(1.0)
    watch = StallWatch(progress, 60.0, TellingClock())
    assert looks(watch, 20)[-1] is Verdict.SUSPECT
    progress.announce(1.0)
    assert set(looks(watch, 9)) == {Verdict.MOVES}


def test_time_that_the_process_could_not_use_does_not_count_but_for_the_bound() -> None:
    clock = TellingClock()
    clock.share = 0.0
    watch = StallWatch(Progress(1.0), 30.0, clock)
    verdicts = looks(watch, 310)
    assert Verdict.SUSPECT not in verdicts
    assert verdicts[-1] is Verdict.STUCK
    assert verdicts[290] is Verdict.MOVES


def test_time_in_which_the_process_stood_still_hardly_counts() -> None:
    progress = Progress(10.0)
    watch = StallWatch(progress, 60.0, TellingClock())
    assert watch.look(3600.0, 1.0) is Verdict.MOVES
    assert watch.stalled_s == 8.0
    progress.announce(10.0)
    assert watch.look(1.0, 1.0) is Verdict.MOVES
    assert watch.stalled_s == 0.0


SCENES = """
import json, subprocess, sys, threading, time
from engine_worker.stall_clock import StallClock

def spin():
    while not over.is_set():
        pass

def counted():
    clock = StallClock()
    clock.begin()
    time.sleep(0.2)
    return clock.look(100.0)

def counted_in_the_end(wanted):
    # On a busy machine a thread that is about to sleep waits for a CPU for long.
    return next((seconds for seconds in (counted() for _ in range(100)) if seconds == wanted), None)

over, found = threading.Event(), {}
threading.Thread(target=over.wait, daemon=True).start()

def look():  # as the lease thread does, while the main thread sleeps
    found["asleep"] = counted_in_the_end(100.0)
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    found["child works"] = counted_in_the_end(0.0)
    child.kill()
    child.wait()
    found["child gone"] = counted_in_the_end(100.0)
    spinner = threading.Thread(target=spin)
    spinner.start()
    found["spins"] = counted()
    over.set()
    spinner.join()

looker = threading.Thread(target=look)
looker.start()
looker.join()
print(json.dumps(found))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="what threads do is read from /proc")
def test_sleep_counts_in_full_and_work_for_the_cpu_it_had() -> None:
    done = subprocess.run([sys.executable, "-c", SCENES], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["asleep"] == 100.0
    assert found["child works"] == 0.0
    assert found["child gone"] == 100.0
    assert 0.0 <= found["spins"] < 100.0, "no more than the CPU time it had"


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="what threads do is read from /proc")
def test_where_threads_cannot_be_seen_nothing_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("engine_worker.stall_clock._TASKS", tmp_path / "none")
    clock = StallClock()
    clock.begin()
    assert clock.look(1.0) == 0.0
