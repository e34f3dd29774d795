"""The native kernels for tests: skipped, and loudly, where this machine cannot run them."""

from __future__ import annotations

from typing import Final, Literal

import pytest

from engine_worker.kernels.build import TARGETS, BuildSettings, TargetName, missing_cpu_flags
from engine_worker.kernels.cpu import CpuOps
from engine_worker.kernels.kv_quantization import KvFormat
from engine_worker.kernels.packing import WeightFormat

_MISSING: Final = {target: missing_cpu_flags(BuildSettings().cpuinfo, target) for target in TARGETS}


def _needs(target: TargetName) -> pytest.MarkDecorator:
    return pytest.mark.skipif(bool(_MISSING[target]), reason=f"this CPU has no {', '.join(_MISSING[target])}")


needs_native = _needs("avx2" if _MISSING["avx512"] else "avx512")
each_target = pytest.mark.parametrize("target", [pytest.param(target, marks=_needs(target)) for target in TARGETS])


def available_targets() -> list[TargetName]:
    return [target for target in TARGETS if not _MISSING[target]]


def native_ops(
    weight_format: WeightFormat,
    num_threads: int = 2,
    target: Literal["auto", TargetName] = "auto",
    kv_format: KvFormat = "activations",
) -> CpuOps:
    return CpuOps(weight_format, num_threads=num_threads, build=BuildSettings(target=target), kv_format=kv_format)
