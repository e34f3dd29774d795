"""Timing a step that is run again and again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_ms(step: Callable[[], object], seconds: float, *, warm_up: int, most: int) -> float:
    """Of whole steps, by the clock on the wall, for ``seconds`` or ``most`` steps."""
    for _ in range(warm_up):
        step()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and len(times) < most:
        start = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)
