"""The bound that figures stand beside, and what others take of the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from cli.bench.machine import Disturbance, Reference, cpu_s, measure_reference
from cli.bench.serve import BenchServeSettings, settled


def test_a_step_is_bound_by_its_weights_or_by_its_products_whichever_takes_longer() -> None:
    reference = Reference(read_gb_per_s=10.0, matmul_gflop_per_s=100.0)
    assert reference.bound_s(weight_bytes=10**9, num_params=10**9, num_tokens=1) == pytest.approx(0.1)
    assert reference.bound_s(weight_bytes=10**9, num_params=10**9, num_tokens=100) == pytest.approx(2.0)


def test_the_machine_can_be_measured() -> None:
    reference = measure_reference()
    assert reference.read_gb_per_s > 0
    assert reference.matmul_gflop_per_s > 0
    assert "GB/s" in str(reference)


def test_only_the_time_of_others_counts_as_a_disturbance() -> None:
    program = "import time\nend = time.monotonic() + 0.6\nwhile time.monotonic() < end: pass"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        disturbance = Disturbance()
        process.wait()
        assert disturbance.cores() > 0
    own = cpu_s(os.getpid())
    assert own == pytest.approx(time.process_time(), abs=1.0)
    assert cpu_s(process.pid) == 0.0


def test_a_named_workload_takes_the_place_of_the_free_parameters() -> None:
    settings = settled(BenchServeSettings(workload="D", requests=7))
    assert (settings.concurrency, settings.requests, settings.prompt_tokens, settings.system_tokens) == (
        16,
        48,
        "64",
        512,
    )
    assert settled(BenchServeSettings(requests=7)).requests == 7
