"""The two queues between the engine thread and the I/O loop, and the sign of life of the step loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from common.errors import HeadraceError
from engine_worker.sequence import Sequence
from engine_worker.step import StepResult


@dataclass(frozen=True, slots=True)
class Add:
    """Run these sequences of one request."""

    request_id: str
    sequences: tuple[Sequence, ...]


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget every sequence of a request (cancelled, failed, fenced)."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Finish:
    """A stop string is complete: end this sequence."""

    sequence: Sequence
    stop: str


@dataclass(frozen=True, slots=True)
class Halt:
    """Leave the step loop after the present step."""


Command = Add | Drop | Finish | Halt
Commands = queue.SimpleQueue[Command]


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine cannot run a request at all."""

    request_id: str
    error: HeadraceError


StepReport = StepResult | Refused


class StepReports:
    """Bounded: the engine thread puts, the output stage takes. Full = the engine pauses, so nothing grows while Redis
    is slow or away.

    ``stream_interval``: decode steps that go out together. First tokens and ends do not wait for the others.
    """

    def __init__(self, limit: int, stream_interval: int = 1) -> None:
        self._limit = limit
        self._interval = min(stream_interval, limit)
        self._reports: list[StepReport] = []
        self._changed = threading.Condition()
        self._is_out = threading.Event()
        self._wake: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._reports)

    def on_report(self, wake: Callable[[], None]) -> None:
        """``wake`` is called on the engine thread after a `put` when it is time to take."""
        self._wake = wake

    def put(self, report: StepReport) -> None:
        """Engine thread. Never blocks: call `wait_for_room` before the step that makes the report."""
        with self._changed:
            self._reports.append(report)
            is_due = len(self._reports) >= self._interval or _cannot_wait(report)
        if is_due:
            self._wake()

    def put_and_let_out(self, report: StepReport, timeout_s: float) -> None:
        """Engine thread. As `put`, and wait for `all_out`, so that what it says goes out before cores are computed on
        again; in vain when ``timeout_s`` is over."""
        self._is_out.clear()
        self.put(report)
        self._is_out.wait(timeout_s)

    def all_out(self) -> None:
        """I/O loop: what was taken is in the log, and readers have been told."""
        self._is_out.set()

    def wait_for_room(self, timeout_s: float) -> bool:
        """Engine thread: whether one more report may be made."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._reports) < self._limit, timeout_s)

    def take_all(self) -> list[StepReport]:
        """I/O loop: everything reported so far, oldest first."""
        with self._changed:
            reports, self._reports = self._reports, []
            self._changed.notify_all()
        return reports


def _cannot_wait(report: StepReport) -> bool:
    if isinstance(report, Refused) or report.finished or report.failed or report.prompt_logprobs:
        return True
    return any(sampled.sequence.num_output_tokens == 1 for sampled in report.sampled)


class Progress:
    """The step loop's sign of life, written by the engine thread and read by the lease thread.

    `announce` before everything that may take long (a step, a compilation) says how long it may take.
    """

    def __init__(self, allowance_s: float) -> None:
        self._now: tuple[int, float] = (0, allowance_s)

    def announce(self, allowance_s: float) -> None:
        """The loop is alive; the next sign comes within ``allowance_s``."""
        self._now = (self._now[0] + 1, allowance_s)

    @property
    def latest(self) -> tuple[int, float]:
        """(number of signs given so far, seconds allowed until the next)."""
        return self._now
