"""What the way through HTTP, edge, log and worker costs: the engine in process and ``headrace serve``, turn by turn."""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from bench.servers import FORMATS, Running, get, headrace, running
from cli.bench import engine as in_process
from cli.bench.figures import Figures
from cli.bench.machine import Disturbance, measure_reference
from cli.bench.serve import BenchServeSettings, run, settled
from cli.bench.workload import WORKLOADS, Prose, WorkloadName
from engine_worker.assembly import EngineSettings, load_engine
from engine_worker.config import ComputeSettings, KvCacheSettings, ModelSettings, SchedulerSettings

_KV_BYTES: Final = 1 << 30
_WORKLOADS: Final[tuple[WorkloadName, ...]] = ("A", "B", "C")
_MEANS: Final = (
    "headrace_edge_render_seconds",
    "headrace_edge_submit_seconds",
    "vllm:request_queue_time_seconds",
    "headrace_worker_output_lag_seconds",
    "headrace_worker_append_seconds",
)
_SAMPLE: Final = re.compile(r"^([a-z_:]+)_(sum|count)(?:\{[^}]*\})? ([0-9.eE+-]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Pair:
    """One workload through the engine and, right after it, through the front door."""

    engine_tokens_per_s: float
    served_tokens_per_s: float
    engine_ttft_ms: float  # p50
    served_ttft_ms: float
    engine_itl_ms: float  # p50
    served_itl_ms: float
    other_cores: float  # kept busy by others, the larger of the two


@dataclass(slots=True)
class FrontDoor:
    """Every pair of every round, and where the time of the served runs went."""

    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    cpu_us_per_token: dict[str, list[float]] = field(default_factory=dict)  # at C, by process
    log_us_per_token: dict[str, list[float]] = field(default_factory=dict)  # CPU of the log server, by workload
    means_ms: dict[str, list[float]] = field(default_factory=dict)  # over all, of the servers' own histograms

    def __str__(self) -> str:
        lines = []
        for name, pairs in self.pairs.items():
            ratio = median(pair.served_tokens_per_s / pair.engine_tokens_per_s for pair in pairs)
            ttft = median(pair.served_ttft_ms - pair.engine_ttft_ms for pair in pairs)
            itl = median(pair.served_itl_ms - pair.engine_itl_ms for pair in pairs)
            lines.append(
                f"{name}: {median(pair.served_tokens_per_s for pair in pairs):.0f} of "
                f"{median(pair.engine_tokens_per_s for pair in pairs):.0f} output tokens/s, ratio {ratio:.3f}; "
                f"TTFT p50 {median(pair.engine_ttft_ms for pair in pairs):.1f} {ttft:+.1f} ms; ITL p50 "
                f"{median(pair.engine_itl_ms for pair in pairs):.2f} {itl:+.2f} ms; others "
                f"{median(pair.other_cores for pair in pairs):.2f} cores"
            )
        lines += [
            "CPU us for each output token at C: "
            + ", ".join(f"{part} {median(values):.0f}" for part, values in self.cpu_us_per_token.items()),
            "CPU us of the log server for each output token: "
            + ", ".join(f"{name} {median(values):.0f}" for name, values in self.log_us_per_token.items()),
            "means: " + ", ".join(f"{name} {median(values):.2f} ms" for name, values in self.means_ms.items()),
        ]
        return "\n".join(lines)


def front_door(
    mode: str,
    model_dir: Path,
    *,
    rounds: int,
    seed: int,
    minutes: float,
    workloads: Sequence[WorkloadName] = _WORKLOADS,
) -> FrontDoor:
    """Engine and server take turns workload by workload, so that both meet the same minute of the machine.

    At least one round; no new one after ``minutes``. Raises `ServerFailed` and `HeadraceError`.
    """
    known = FORMATS[mode]
    report, deadline = FrontDoor(), time.monotonic() + 60 * minutes
    assembly = load_engine(
        EngineSettings(
            ModelSettings(model=str(model_dir), quantization=known.quantization, kv_cache_dtype=known.kv_cache_dtype),
            ComputeSettings(),
            SchedulerSettings(),
            KvCacheSettings(kv_cache_memory_bytes=_KV_BYTES),
        )
    )
    prose, reference = Prose(), measure_reference()
    in_process.warm_up(assembly, prose)
    with (
        tempfile.TemporaryDirectory(prefix="headrace-front-door-") as directory,
        running(headrace(mode, model_dir), Path(directory)) as live,
    ):
        before = _histograms(live.url)
        for turn in range(rounds):
            if turn and time.monotonic() > deadline:
                break
            for name in workloads:
                rng = random.Random(f"{seed + turn} {name}")
                engine = in_process.run(assembly, WORKLOADS[name], prose, rng, reference)
                served, others = _serve(report, live, name, seed + turn, model_dir)
                report.pairs.setdefault(name, []).append(_pair(engine.figures, served, max(engine.other_cores, others)))
        _note_means(report, before, _histograms(live.url))
    return report


def _serve(report: FrontDoor, live: Running, name: WorkloadName, seed: int, model_dir: Path) -> tuple[Figures, float]:
    """Figures through the front door, and the cores that others kept busy."""
    settings = settled(BenchServeSettings(url=live.url, bench_model=live.model, workload=name))
    settings = settings.model_copy(
        update={
            "warmup_requests": 2 if name == "A" else 0,
            "bench_seed": seed,
            "bench_tokenizer": model_dir / "tokenizer.json",
        }
    )
    cpu, client, started, others = live.cpu_by_part(), time.process_time(), time.perf_counter(), Disturbance()
    figures, outcomes, _ = asyncio.run(run(settings))
    spent = {part: total - cpu.get(part, 0.0) for part, total in live.cpu_by_part().items()}
    other_cores = max(0.0, others.cores() - sum(spent.values()) / (time.perf_counter() - started))
    tokens = sum(outcome.output_tokens for outcome in outcomes)
    report.log_us_per_token.setdefault(name, []).append(1e6 * spent.get("log", 0.0) / tokens)
    if name == "C":
        for part, seconds in (*sorted(spent.items()), ("client", time.process_time() - client)):
            report.cpu_us_per_token.setdefault(part, []).append(1e6 * seconds / tokens)
    return figures, other_cores


def _pair(engine: Figures, served: Figures, other_cores: float) -> Pair:
    def p50s(figures: Figures) -> tuple[float, float]:
        return figures.ttft_ms.p50 if figures.ttft_ms else 0.0, figures.itl_ms.p50 if figures.itl_ms else 0.0

    (engine_ttft, engine_itl), (served_ttft, served_itl) = p50s(engine), p50s(served)
    return Pair(
        engine_tokens_per_s=engine.output_tokens_per_s,
        served_tokens_per_s=served.output_tokens_per_s,
        engine_ttft_ms=engine_ttft,
        served_ttft_ms=served_ttft,
        engine_itl_ms=engine_itl,
        served_itl_ms=served_itl,
        other_cores=other_cores,
    )


def _note_means(report: FrontDoor, before: dict[str, float], after: dict[str, float]) -> None:
    for name in _MEANS:
        number = after[f"{name}_count"] - before[f"{name}_count"]
        if number:
            report.means_ms[name] = [1000 * (after[f"{name}_sum"] - before[f"{name}_sum"]) / number]


def _histograms(url: str) -> dict[str, float]:
    """Sums and counts of every histogram on the first edge's page, all label values together."""
    found: dict[str, float] = defaultdict(float)
    for name, kind, value in _SAMPLE.findall(get(f"{url.removesuffix('/v1')}/metrics")):
        found[f"{name}_{kind}"] += float(value)
    return found
