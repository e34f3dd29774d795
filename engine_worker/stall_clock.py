"""Time that counts against a step in hand: time in which the process could have gone on with it, and did not.

A machine that others use, swaps or sleeps makes steps slow without end, and none of that is a hang. What a look finds
in ``/proc`` tells them apart:

* somebody of this process wants a CPU: what counts is the CPU time that the one who got least of it had. Threads that
  are starved count for nothing, a loop without end for all of the time it runs;
* a thread waits for a disk (swapping): nothing counts;
* a child process works or waits for a disk (a compiler): nothing counts;
* everybody sleeps: all of the time counts. A deadlock looks so, and a device that does not answer.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_TASKS: Final = Path("/proc/self/task")
_RUNNABLE, _IN_DISK_WAIT = "R", "D"
_PER_THREAD_CPU: Final = 6  # of a clock id: CPUCLOCK_PERTHREAD_MASK | CPUCLOCK_SCHED


class StallClock:
    """For one thread, whose own time does not count. Where there is no ``/proc`` nothing ever counts."""

    def __init__(self) -> None:
        self._cpu_s: dict[int, float] = {}
        self._me = 0

    def begin(self) -> None:
        """The next look counts from here."""
        self._me = threading.get_native_id()
        self._cpu_s = {tid: cpu_s for tid, _, cpu_s in self._threads()}

    def look(self, elapsed_s: float) -> float:
        """How much of ``elapsed_s``, the time since the last look (or `begin`), counts."""
        before, found = self._cpu_s, list(self._threads())
        self._cpu_s = {tid: cpu_s for tid, _, cpu_s in found}
        states = {state for _, state, _ in found}
        if not found or _IN_DISK_WAIT in states:
            return 0.0
        if _RUNNABLE in states:
            had = min(cpu_s - before.get(tid, 0.0) for tid, state, cpu_s in found if state == _RUNNABLE)
            return min(elapsed_s, had)
        return 0.0 if _has_working_children() else elapsed_s

    def _threads(self) -> Iterator[tuple[int, str, float]]:
        """(thread, state, CPU seconds) of all threads but this one."""
        if not _TASKS.is_dir():
            return
        for task in _TASKS.iterdir():
            tid = int(task.name)
            if tid == self._me:
                continue
            with contextlib.suppress(OSError):  # it has ended meanwhile
                yield tid, _state(task), time.clock_gettime((~tid << 3) | _PER_THREAD_CPU)


def _state(task: Path) -> str:
    """Of ``PID (NAME) STATE ...``; the name may hold anything."""
    return (task / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]


def _has_working_children() -> bool:
    pending, looked = [_TASKS], 0
    while pending and looked < 1000:
        tasks = pending.pop()
        for child in _children(tasks):
            looked += 1
            with contextlib.suppress(OSError):
                if _state(Path("/proc") / child) in (_RUNNABLE, _IN_DISK_WAIT):
                    return True
            pending.append(Path("/proc") / child / "task")
    return False


def _children(tasks: Path) -> list[str]:
    found: list[str] = []
    with contextlib.suppress(OSError):
        for task in tasks.iterdir():
            with contextlib.suppress(OSError):
                found += (task / "children").read_text(encoding="ascii").split()
    return found
