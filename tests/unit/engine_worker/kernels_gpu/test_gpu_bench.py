"""The script that checks and measures the GPU path runs where there is no GPU as far as it can."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.gpu import SMOLLM2
from bench.gpu_steps import Steps, random_model
from engine_worker.runner.cuda_graphs import no_graph
from engine_worker.runner.loading import LoadedModel
from tests.unit.engine_worker.kernels.native import needs_native

TINY_MODEL = SMOLLM2 | {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def _bench_gpu(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "bench.gpu", *arguments], capture_output=True, text=True, env=environment, check=False
    )


def test_the_checks_run_in_the_interpreter(tmp_path: Path) -> None:
    result = _bench_gpu("--interpret", "--json", str(tmp_path / "figures.json"))
    assert result.returncode == 0, result.stdout + result.stderr
    checks = json.loads((tmp_path / "figures.json").read_text())["checks"]
    assert len(checks) > 50
    assert all(check["error"] <= check["tolerance"] for check in checks)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    result = _bench_gpu()
    assert result.returncode == 2
    assert result.stderr.startswith("bench.gpu: there is no GPU")


def _drawn(model: LoadedModel, **how: Any) -> list[tuple[int, ...]]:
    steps = Steps(model, 5, 20, **how)
    for _ in range(3):
        steps.decode()
    return steps.tokens()


@needs_native
def test_steps_with_graphs_draw_what_steps_without_do(tmp_path: Path) -> None:
    model = random_model(TINY_MODEL, tmp_path, backend="native", device="cpu")
    assert _drawn(model, graphs=True, capture=no_graph) == _drawn(model, graphs=False)


def test_padded_steps_on_triton_draw_what_plain_ones_do(tmp_path: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = random_model(TINY_MODEL, tmp_path, backend="triton", device=device)
    assert _drawn(model, graphs=True, capture=no_graph) == _drawn(model, graphs=False)
