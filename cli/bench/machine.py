"""What this machine can do while something is measured: a figure of it stands beside every figure of ours.

Shared machines change from minute to minute. The ratio of a measured time to `Reference.bound_s` moves far less than
the time itself, so runs of different minutes can be compared by it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

_READ_BYTES: Final = 256 << 20
_SIDE: Final = 1536
_REPEATS: Final = 5


@dataclass(frozen=True, slots=True)
class Reference:
    """Plain torch on the threads that the engine uses, best of a few repeats."""

    read_gb_per_s: float  # a sum over 256 MiB
    matmul_gflop_per_s: float  # bf16, 1536 x 1536 x 1536

    def bound_s(self, weight_bytes: int, num_params: int, num_tokens: int) -> float:
        """What a step of ``num_tokens`` takes at these rates: its weights read once, or its products computed."""
        return max(
            weight_bytes / self.read_gb_per_s / 1e9,
            2.0 * num_params * num_tokens / self.matmul_gflop_per_s / 1e9,
        )

    def __str__(self) -> str:
        return f"reads {self.read_gb_per_s:.1f} GB/s, multiplies {self.matmul_gflop_per_s:.0f} GFLOP/s in bf16"


def measure_reference() -> Reference:
    """About a second."""
    data = torch.zeros(_READ_BYTES // 4, dtype=torch.float32)
    left = torch.full((_SIDE, _SIDE), 0.5, dtype=torch.bfloat16)
    return Reference(
        read_gb_per_s=_READ_BYTES / _best_s(data.sum) / 1e9,
        matmul_gflop_per_s=2 * _SIDE**3 / _best_s(lambda: left @ left) / 1e9,
    )


def _best_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS + 1):  # the first one pays for pages and code
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times[1:])


class Disturbance:
    """CPU time that others took from its creation on; above about 15 % of a core a run is better repeated."""

    def __init__(self, process_ids: tuple[int, ...] = ()) -> None:
        """``process_ids``: further processes that belong to what is measured."""
        self._process_ids = process_ids
        self._started = time.perf_counter()
        self._busy_s = self._others_s()

    def cores(self) -> float:
        """Cores that processes other than ours kept busy, on average; 0 where /proc is not there."""
        return max(0.0, (self._others_s() - self._busy_s) / (time.perf_counter() - self._started))

    def _others_s(self) -> float:
        return busy_s() - time.process_time() - sum(cpu_s(process_id) for process_id in self._process_ids)


def busy_s() -> float:
    """CPU seconds that the whole machine has spent on anything since it was started."""
    try:
        fields = [int(field) for field in Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]]
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq = fields[:7]
    return (user + nice + system + irq + softirq) / _ticks()


def cpu_s(process_id: int) -> float:
    """CPU seconds of one process, all its threads; 0 when it is gone."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    fields = stat.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _ticks()


def _ticks() -> int:
    return int(os.sysconf("SC_CLK_TCK"))
