"""Child processes of serve: started, restarted, stopped, and gone with their parent. All of them are real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.supervisor import ChildFailed, ChildSpec, Supervisor

SLEEP = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class World:
    """One supervisor, what it said, and a clock that only the test moves."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.said: list[str] = []
        self.clock = Clock()
        self.supervisor: Supervisor | None = None

    def start(self, *programs: str, role: str = "worker") -> Supervisor:
        specs = [
            ChildSpec(f"{role}-{i + 1}", role, ("-c", program), dict(os.environ)) for i, program in enumerate(programs)
        ]
        self.supervisor = Supervisor(specs, self.run_dir, self.said.append, self.clock)
        self.supervisor.check()
        return self.supervisor


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "run")
    yield world
    if world.supervisor is not None:
        world.supervisor.stop("worker", 0.0, lambda: True)


def eventually(condition: Callable[[], bool], within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    return state != "Z"


def test_children_are_started_and_their_pids_are_on_disk(world: World) -> None:
    supervisor = world.start(SLEEP, SLEEP)
    pids = supervisor.pids()
    assert set(pids) == {"worker-1", "worker-2"}
    assert int((world.run_dir / "worker-2.pid").read_text(encoding="ascii")) == pids["worker-2"]


def test_a_child_runs_without_a_pid_file_where_none_can_be_written(world: World) -> None:
    (world.run_dir / "worker-1.pid").mkdir(parents=True)
    supervisor = world.start(SLEEP)
    assert is_alive(supervisor.pids()["worker-1"])
    assert "without a pid file" in world.said[-1]
    (world.run_dir / "worker-1.pid").rmdir()


def test_a_child_that_dies_is_restarted_after_a_growing_wait_and_says_so(world: World) -> None:
    supervisor = world.start(SLEEP)
    supervisor.all_ready()
    seen = set()
    for wait_s in (0.5, 1.0, 2.0):
        pid = supervisor.pids()["worker-1"]
        seen.add(pid)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: not supervisor.pids())
        supervisor.check()
        assert world.said[-1] == f"worker-1 died (killed by SIGKILL), restarting in {wait_s:g} s"
        world.clock.now += wait_s - 0.01
        supervisor.check()
        assert not supervisor.pids()
        world.clock.now += 0.02
        supervisor.check()
        assert supervisor.pids()["worker-1"] not in seen


def test_a_child_that_lived_long_is_restarted_soon_again(world: World) -> None:
    supervisor = world.start(SLEEP)
    supervisor.all_ready()
    for _ in range(2):
        world.clock.now += 61
        supervisor.check()
        os.kill(supervisor.pids()["worker-1"], signal.SIGKILL)
        eventually(lambda: not supervisor.pids())
        supervisor.check()
        assert world.said[-1].endswith("restarting in 0.5 s")
        world.clock.now += 1
        supervisor.check()


def test_a_child_that_refuses_its_settings_is_not_tried_again(world: World) -> None:
    supervisor = world.start("raise SystemExit(2)")
    eventually(lambda: not supervisor.pids())
    with pytest.raises(ChildFailed, match=r"^worker-1 could not be started: exit code 2; its own message is above$"):
        supervisor.check()


def test_what_a_child_left_as_its_reason_is_told_in_one_line(world: World) -> None:
    supervisor = world.start("from common import last_words; last_words.leave('no model\\nat x'); raise SystemExit(2)")
    eventually(lambda: not supervisor.pids())
    with pytest.raises(ChildFailed, match=r"^worker-1 could not be started: no model; at x$"):
        supervisor.check()
    assert list(world.run_dir.iterdir()) == []


def test_a_child_that_ends_in_order_is_started_again_and_has_not_died(world: World) -> None:
    supervisor = world.start("from common import last_words; last_words.leave('its requests are handed over')")
    supervisor.all_ready()
    eventually(lambda: not supervisor.pids())
    supervisor.check()
    assert world.said == ["worker-1 has ended (its requests are handed over), restarting in 0.5 s"]


def test_a_child_that_never_comes_up_is_given_up(world: World) -> None:
    supervisor = world.start("raise SystemExit(7)")
    for _ in range(2):
        eventually(lambda: not supervisor.pids())
        supervisor.check()
        assert world.said[-1].startswith("worker-1 died (exit code 7)")
        world.clock.now += 60
        supervisor.check()
    eventually(lambda: not supervisor.pids())
    with pytest.raises(ChildFailed, match="exit code 7"):
        supervisor.check()


def test_a_stop_lets_children_end_and_kills_those_that_do_not(world: World) -> None:
    supervisor = world.start(SLEEP, STUBBORN)
    stubborn = supervisor.pids()["worker-2"]
    eventually(lambda: _ignores_term(stubborn))

    def forced() -> bool:
        world.clock.now += 0.5
        return False

    supervisor.stop("worker", 3.0, forced)
    assert supervisor.pids() == {}
    assert world.said == ["worker-2 did not stop within 3 s, killed"]
    assert list(world.run_dir.iterdir()) == []


def test_a_forced_stop_kills_at_once(world: World) -> None:
    supervisor = world.start(STUBBORN)
    start = time.monotonic()
    supervisor.stop("worker", 600.0, lambda: True)
    assert time.monotonic() - start < 300
    assert world.said == []


def test_only_the_named_role_is_stopped(world: World) -> None:
    supervisor = world.start(SLEEP)
    supervisor.stop("edge", 1.0, lambda: False)
    assert set(supervisor.pids()) == {"worker-1"}


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = f"""
import os, pathlib, time
from cli.supervisor import ChildSpec, Supervisor
spec = ChildSpec("worker-1", "worker", ("-c", {SLEEP!r}), dict(os.environ))
Supervisor([spec], pathlib.Path({str(tmp_path)!r}), print).check()
time.sleep(600)
"""
    pid_file = tmp_path / "worker-1.pid"
    with subprocess.Popen([sys.executable, "-c", program]) as parent:
        eventually(lambda: pid_file.exists() and pid_file.read_text(encoding="ascii").endswith("\n"))
        child = int(pid_file.read_text(encoding="ascii"))
        assert is_alive(child)
        parent.kill()
    eventually(lambda: not is_alive(child))


def _ignores_term(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    mask = next(line for line in status.splitlines() if line.startswith("SigIgn:")).split()[1]
    return bool(int(mask, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_child_of_no_use_is_killed_and_started_again(world: World) -> None:
    supervisor = world.start(STUBBORN)
    before = supervisor.pids()["worker-1"]
    supervisor.all_ready()
    supervisor.kill("worker-1", "says nothing")
    supervisor.kill("worker-1", "says nothing")
    supervisor.kill("nobody", "says nothing")
    supervisor.check()
    world.clock.now += 1.0
    supervisor.check()
    assert supervisor.pids()["worker-1"] != before
    assert [line for line in world.said if "says nothing" in line] == ["worker-1 says nothing, killed"]
