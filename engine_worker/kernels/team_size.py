"""How many threads compute a step, learnt from how long steps take.

Threads of a step wait for each other some hundred times. Where another process wants one of their CPUs, all of them
are as slow as the one that lost it: beside one busy process, two threads on two CPUs took 10 times as long as one.
And a step that only reads weights is as fast on one thread as on two. The results are the same bits for any number of
threads, so the number may change from step to step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

SMOOTHING: Final = 0.25  # weight of the newest measurement
MIN_GAIN: Final = 0.9  # more threads must take less than this share of the time: CPUs are wanted by others too
FIRST_PROBE: Final = 4  # steps until another size is tried first
PROBE_INTERVAL: Final = 64  # steps between trials of a size that is about as good ...
MAX_PROBE_INTERVAL: Final = 1000  # ... and of one that is far worse


@dataclass(slots=True)
class _Class:
    """What is known about steps of a similar number of tokens."""

    costs: list[float | None]  # seconds a token for each size
    chosen: int  # index into the sizes
    steps_to_probe: int = FIRST_PROBE
    probes_up: bool = False


class TeamSize:
    """One size for each power of two of tokens: 1, 2-3, 4-7, ...; used by one thread."""

    def __init__(self, max_threads: int) -> None:
        self.sizes = tuple(sorted({min(1 << i, max_threads) for i in range(max_threads.bit_length() + 1)}))
        self._classes: dict[int, _Class] = {}

    def choose(self, num_tokens: int) -> int:
        """Threads for the next step: the best size known, now and then one of its neighbours."""
        known = self._class_of(num_tokens)
        known.steps_to_probe -= 1
        if known.steps_to_probe >= 0:
            return self.sizes[known.chosen]
        known.probes_up = not known.probes_up
        neighbour = known.chosen + (1 if known.probes_up else -1)
        if not 0 <= neighbour < len(self.sizes):
            neighbour = 2 * known.chosen - neighbour
        return self.sizes[neighbour if 0 <= neighbour < len(self.sizes) else known.chosen]

    def report(self, num_tokens: int, num_threads: int, seconds: float) -> None:
        """A step of ``num_tokens`` took ``seconds`` on ``num_threads``, one of the sizes."""
        known, size = self._class_of(num_tokens), self.sizes.index(num_threads)
        cost, before = seconds / num_tokens, known.costs[size]
        is_probe = known.steps_to_probe < 0  # what is known of its size is old
        known.costs[size] = cost if before is None or is_probe else before + SMOOTHING * (cost - before)
        if is_probe:
            known.steps_to_probe = self._interval(known, size)
        known.chosen = self._best(known)

    def _best(self, known: _Class) -> int:
        best, best_cost = known.chosen, float("inf")
        for size, cost in enumerate(known.costs):
            if cost is not None and cost < (MIN_GAIN * best_cost):
                best, best_cost = size, cost
        return best

    @staticmethod
    def _interval(known: _Class, probed: int) -> int:
        cost, usual = known.costs[probed], known.costs[known.chosen]
        if cost is None or usual is None:
            return PROBE_INTERVAL
        worse = max(1.0, cost / usual)
        return min(MAX_PROBE_INTERVAL, int(PROBE_INTERVAL * worse * worse))

    def _class_of(self, num_tokens: int) -> _Class:
        key = num_tokens.bit_length()
        known = self._classes.get(key)
        if known is None:
            known = self._classes[key] = _Class([None] * len(self.sizes), len(self.sizes) - 1)
        return known
