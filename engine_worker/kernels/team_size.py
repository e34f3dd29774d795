"""How many threads compute a step, learnt from how long steps take.

Where a process keeps one of their CPUs busy for long, threads are slower than fewer of them: a step ends when all have
left it. And a step that only reads weights may be as fast on one thread as on two. The results are the same bits for
any number of threads, so the number may change from step to step.

The cost of a size is the median of its last steps: the first of all steps meet cold memory, and a shared machine stops
now and then. Taking a size for worse than it is costs most where it has more threads, so these are tried again sooner.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Final

REMEMBERED: Final = 5  # steps of a size
MIN_GAIN: Final = 0.9  # more threads must take less than this share of the time: CPUs are wanted by others too
FIRST_PROBE: Final = 6  # steps until another size is tried first
FEWER_INTERVAL: Final = 64  # steps between trials of fewer threads that are about as good ...
MORE_INTERVAL: Final = 8  # ... and of more; of a size that is twice as slow, four times as many
MAX_INTERVAL: Final = 500


@dataclass(slots=True)
class _Class:
    """What is known about steps of a similar number of tokens."""

    costs: list[deque[float]]  # seconds a token of the last steps of each size
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
        is_probe = known.steps_to_probe < 0
        if is_probe:
            known.costs[size].clear()  # what is known of it is old
        known.costs[size].append(seconds / num_tokens)
        medians = [median(costs) if costs else None for costs in known.costs]
        if is_probe:
            known.steps_to_probe = self._interval(medians, known.chosen, size)
        known.chosen = self._best(medians, known.chosen)

    @staticmethod
    def _best(medians: list[float | None], chosen: int) -> int:
        best, best_cost = chosen, float("inf")
        for size, cost in enumerate(medians):
            if cost is not None and cost < MIN_GAIN * best_cost:
                best, best_cost = size, cost
        return best

    @staticmethod
    def _interval(medians: list[float | None], chosen: int, probed: int) -> int:
        shortest = MORE_INTERVAL if probed > chosen else FEWER_INTERVAL
        cost, usual = medians[probed], medians[chosen]
        if cost is None or usual is None:
            return shortest
        worse = max(1.0, cost / usual)
        return min(MAX_INTERVAL, int(shortest * worse * worse))

    def _class_of(self, num_tokens: int) -> _Class:
        key = num_tokens.bit_length()
        known = self._classes.get(key)
        if known is None:
            costs = [deque[float](maxlen=REMEMBERED) for _ in self.sizes]
            known = self._classes[key] = _Class(costs, len(self.sizes) - 1)
        return known
