"""The native kernels for tests: skipped, and loudly, where this machine cannot run them."""

from __future__ import annotations

from typing import Final

import pytest

from engine_worker.kernels.build import BuildSettings, missing_cpu_flags
from engine_worker.kernels.cpu import CpuOps
from engine_worker.kernels.packing import WeightFormat

MISSING: Final = missing_cpu_flags(BuildSettings().cpuinfo)
needs_native = pytest.mark.skipif(bool(MISSING), reason=f"this CPU has no {', '.join(MISSING)}")


def native_ops(weight_format: WeightFormat, num_threads: int = 2) -> CpuOps:
    return CpuOps(weight_format, num_threads=num_threads)
