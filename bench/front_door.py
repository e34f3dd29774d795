"""What the way through HTTP, edge, log and worker costs: the engine in process against ``headrace serve``, in turn."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.servers import get, headrace, running
from cli.bench.figures import Figures
from cli.bench.serve import BenchServeSettings, run, settled
from cli.bench.workload import WorkloadName

_WORKLOADS: Final[tuple[WorkloadName, ...]] = ("A", "B", "C")
_MEANS: Final = (
    "headrace_edge_render_seconds",
    "headrace_edge_submit_seconds",
    "vllm:request_queue_time_seconds",
    "headrace_worker_output_lag_seconds",
    "headrace_worker_append_seconds",
)
_SAMPLE: Final = re.compile(r"^([a-z_:]+)_(sum|count)(?:\{[^}]*\})? ([0-9.eE+-]+)", re.MULTILINE)


@dataclass(slots=True)
class FrontDoor:
    """Medians over the rounds come from these lists, one entry a round."""

    engine_tokens_per_s: list[float] = field(default_factory=list)  # at C
    served_tokens_per_s: list[float] = field(default_factory=list)  # at C
    engine_ttft_ms: list[float] = field(default_factory=list)  # p50 at A
    served_ttft_ms: list[float] = field(default_factory=list)
    engine_itl_ms: list[float] = field(default_factory=list)  # p50 at B
    served_itl_ms: list[float] = field(default_factory=list)
    cpu_us_per_token: dict[str, list[float]] = field(default_factory=dict)  # at C, by process
    means_ms: dict[str, list[float]] = field(default_factory=dict)  # at C, of the servers' own histograms

    def __str__(self) -> str:
        engine, served = median(self.engine_tokens_per_s), median(self.served_tokens_per_s)
        ttft, itl = median(self.engine_ttft_ms), median(self.engine_itl_ms)
        lines = [
            f"C: {served:.0f} of {engine:.0f} output tokens/s, ratio {served / engine:.3f}",
            f"A: TTFT p50 {ttft:.1f} ms + {median(self.served_ttft_ms) - ttft:.1f} ms",
            f"B: ITL p50 {itl:.2f} ms + {median(self.served_itl_ms) - itl:.2f} ms",
            "CPU us for each output token at C: "
            + ", ".join(f"{part} {median(values):.0f}" for part, values in self.cpu_us_per_token.items()),
            "means at C: " + ", ".join(f"{name} {median(values):.2f} ms" for name, values in self.means_ms.items()),
        ]
        return "\n".join(lines)


def front_door(quantization: str, model_dir: Path, *, rounds: int, seed: int, minutes: float) -> FrontDoor:
    """Engine, server, engine, server ... At least one round, no new one after ``minutes``."""
    report, deadline = FrontDoor(), time.monotonic() + 60 * minutes
    for turn in range(rounds):
        if turn and time.monotonic() > deadline:
            break
        _engine_turn(report, quantization, model_dir, seed + turn)
        _server_turn(report, quantization, model_dir, seed + turn)
    return report


def _engine_turn(report: FrontDoor, quantization: str, model_dir: Path, seed: int) -> None:
    with tempfile.TemporaryDirectory(prefix="headrace-front-door-") as directory:
        out = Path(directory) / "engine.json"
        options = [word for workload in _WORKLOADS for word in ("--workload", workload)]
        options += ["--quantization", quantization, "--seed", str(seed), "--json", str(out)]
        command = [sys.executable, "-m", "cli.main", "bench", "engine", str(model_dir), *options]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        runs: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))["workloads"]
    report.engine_ttft_ms.append(runs["A"]["figures"]["ttft_ms"]["p50"])
    report.engine_itl_ms.append(runs["B"]["figures"]["itl_ms"]["p50"])
    report.engine_tokens_per_s.append(runs["C"]["figures"]["output_tokens_per_s"])


def _server_turn(report: FrontDoor, quantization: str, model_dir: Path, seed: int) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="headrace-front-door-") as directory,
        running(headrace(quantization, model_dir), Path(directory)) as live,
    ):
        figures: dict[str, Figures] = {}
        for name in _WORKLOADS:
            settings = settled(BenchServeSettings(url=live.url, bench_model=live.model, workload=name))
            settings = settings.model_copy(update={"bench_seed": seed, "bench_tokenizer": model_dir / "tokenizer.json"})
            cpu, client, before = live.cpu_by_part(), time.process_time(), _histograms(live.url)
            figures[name], outcomes, _ = asyncio.run(run(settings))
        tokens = sum(outcome.output_tokens for outcome in outcomes)  # of C, the last one
        spent = {part: total - cpu.get(part, 0.0) for part, total in live.cpu_by_part().items()}
        spent["client"] = time.process_time() - client
        after = _histograms(live.url)
    ttft, itl = figures["A"].ttft_ms, figures["B"].itl_ms
    report.served_ttft_ms.append(ttft.p50 if ttft else 0.0)
    report.served_itl_ms.append(itl.p50 if itl else 0.0)
    report.served_tokens_per_s.append(figures["C"].output_tokens_per_s)
    for part, seconds in sorted(spent.items()):
        report.cpu_us_per_token.setdefault(part, []).append(1e6 * seconds / tokens)
    for metric in _MEANS:
        number = after[f"{metric}_count"] - before[f"{metric}_count"]
        if number:
            total = after[f"{metric}_sum"] - before[f"{metric}_sum"]
            report.means_ms.setdefault(metric, []).append(1000 * total / number)


def _histograms(url: str) -> Counter[str]:
    """Sums and counts of every histogram on the first edge's page, all label values together."""
    found: Counter[str] = Counter()
    for name, kind, value in _SAMPLE.findall(get(f"{url.removesuffix('/v1')}/metrics")):
        found[f"{name}_{kind}"] += float(value)  # type: ignore[assignment]  # a counter of seconds
    return found
