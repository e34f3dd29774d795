"""Whether the step loop is stuck, judged in two stages: a suspicion is cheap to take back, and an exit is not."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from engine_worker.handoff import Progress
from engine_worker.stall_clock import StallClock

_CERTAIN: Final = 4  # times the allowance
_TRUSTED: Final = 1 / 4  # of the allowance, before it is looked at what the process does
_LATE: Final = 4  # looks' time between two looks: the process itself stood still, or got no CPU


class Verdict(Enum):
    """MOVES -> SUSPECT -> STUCK; from SUSPECT back to MOVES when the step ends after all."""

    MOVES = auto()
    SUSPECT = auto()  # others had better take over
    STUCK = auto()  # the process is of no use any more


class StallWatch:
    """Fed by the lease thread with the time between its own looks."""

    def __init__(self, progress: Progress, bound_s: float, clock: StallClock) -> None:
        """``bound_s``: wall time without a sign of life that makes a loop STUCK, whatever it waits for."""
        self._progress = progress
        self._bound_s = bound_s
        self._clock = clock
        self._seen = progress.latest[0]
        self._counted_s = 0.0
        self._is_looking = False
        self.stalled_s = 0.0
        """Wall time since the last sign of life, without that in which the process stood still."""

    def look(self, elapsed_s: float, usual_s: float) -> Verdict:
        """``elapsed_s`` since the last look, which is ``usual_s`` unless the process itself stood still."""
        count, allowance_s = self._progress.latest
        if count != self._seen:
            self._seen, self.stalled_s, self._counted_s, self._is_looking = count, 0.0, 0.0, False
            return Verdict.MOVES
        self.stalled_s += min(elapsed_s, 2 * _LATE * usual_s)
        self._counted_s += self._counted(elapsed_s, allowance_s, is_late=elapsed_s > _LATE * usual_s)
        if self.stalled_s > self._bound_s or self._counted_s > _CERTAIN * allowance_s:
            return Verdict.STUCK
        return Verdict.SUSPECT if self._counted_s > allowance_s else Verdict.MOVES

    def _counted(self, elapsed_s: float, allowance_s: float, *, is_late: bool) -> float:
        if self._is_looking:
            counted_s = self._clock.look(elapsed_s)
        elif self._counted_s < _TRUSTED * allowance_s:
            counted_s = elapsed_s
        else:
            self._clock.begin()
            self._is_looking = True
            counted_s = 0.0
        return 0.0 if is_late else counted_s
