"""Headrace beside other servers of this machine, in turn, in one run: only ratios of one run mean anything.

    python -m bench.compare [--modes int4,int8,bf16] [--workloads A,B,C,D,E] [--rounds 2] [--minutes 20] [--json FILE]
    python -m bench.compare --front-door [--modes int4]     # the engine alone against the way through the front door

Peers are what is found: `llama-server` and `vllm` on PATH (vLLM with --hf-dir), llama-cpp-python with its server extra,
and llama-cpp-python in process (workload A only; no HTTP: a bound). Servers run one at a time in the order A B C A B C;
the client, the prompts and the workloads are those of `headrace bench serve`. A figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Final

from bench.front_door import Quantization, front_door
from bench.servers import Running, Server, ServerFailed, headrace, peers, running
from cli.bench.figures import Figures
from cli.bench.machine import Disturbance
from cli.bench.serve import BenchServeSettings, run, settled
from cli.bench.workload import WORKLOADS, Workload, WorkloadName
from cli.model_import import ensure_demo_model
from common.errors import HeadraceError

IN_PROCESS: Final = "llama-in-process"
_QUANTIZATION: Final[dict[str, Quantization]] = {"int4": "int4", "int8": "int8", "bf16": "none"}


@dataclass(frozen=True, slots=True)
class Sample:
    """What is compared of one run of one workload."""

    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50_ms: float
    itl_p50_ms: float
    errors: int
    other_cores: float

    @classmethod
    def of(cls, figures: Figures, other_cores: float) -> Sample:
        return cls(
            figures.output_tokens_per_s,
            figures.total_tokens_per_s,
            figures.ttft_ms.p50 if figures.ttft_ms else 0.0,
            figures.itl_ms.p50 if figures.itl_ms else 0.0,
            figures.num_errors,
            other_cores,
        )


@dataclass(slots=True)
class Results:
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)  # by workload, then by contender
    start_s: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, workload: str, name: str, sample: Sample) -> None:
        self.samples.setdefault(workload, {}).setdefault(name, []).append(sample)
        print(
            f"{workload} {name:<20}{sample.output_tokens_per_s:>9.1f} tok/s  TTFT {sample.ttft_p50_ms:>7.0f} ms  "
            f"ITL {sample.itl_p50_ms:>6.1f} ms  others {sample.other_cores:.2f} cores"
            + (f"  {sample.errors} FAILED" if sample.errors else ""),
            flush=True,
        )


def measure_server(server: Server, arguments: argparse.Namespace, seed: int, results: Results, deadline: float) -> None:
    """One turn of one server; what it has done is noted as it goes. Raises `ServerFailed` and `HeadraceError`."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-compare-") as directory,
        running(server, Path(directory)) as live,
    ):
        results.start_s.setdefault(server.name, []).append(live.start_s)
        for name in arguments.workloads:
            if time.monotonic() < deadline:
                tokenizer = arguments.model_dir / "tokenizer.json"
                results.add(name, server.name, _load(live, name, seed, tokenizer, arguments.share))


def _load(live: Running, name: WorkloadName, seed: int, tokenizer: Path, share: float) -> Sample:
    settings = settled(BenchServeSettings(url=live.url, bench_model=live.model, workload=name))
    settings = settings.model_copy(
        update={"bench_tokenizer": tokenizer, "bench_seed": seed, "requests": scaled(WORKLOADS[name], share)}
    )
    before, started = sum(live.cpu_by_part().values()), time.perf_counter()
    others = Disturbance()
    figures, _, _ = asyncio.run(run(settings))
    used = (sum(live.cpu_by_part().values()) - before) / (time.perf_counter() - started)
    return Sample.of(figures, max(0.0, others.cores() - used))


def scaled(workload: Workload, share: float) -> int:
    """Requests of a shortened run: never fewer than run at the same time."""
    return max(workload.concurrency, round(share * workload.requests))


def measure_in_process(gguf: Path, seed: int, share: float) -> Sample:
    with tempfile.TemporaryDirectory(prefix="headrace-compare-") as directory:
        out = Path(directory) / "out.json"
        options = ["--seed", str(seed), "--requests", str(scaled(WORKLOADS["A"], share))]
        subprocess.run([sys.executable, "-m", "bench.llama_in_process", str(gguf), str(out), *options], check=True)
        figures = json.loads(out.read_text(encoding="utf-8"))
    return Sample(
        figures["output_tokens_per_s"],
        figures["total_tokens_per_s"],
        figures["ttft_ms"]["p50"],
        figures["itl_ms"]["p50"],
        figures["num_errors"],
        other_cores=0.0,
    )


def compare(arguments: argparse.Namespace) -> Results:
    """Every contender in turn, ``rounds`` times, until all is measured or time is up."""
    gguf = arguments.gguf or arguments.model_dir / "model.gguf"
    servers = [headrace(_QUANTIZATION[mode], arguments.model_dir) for mode in arguments.modes]
    servers += peers(gguf, arguments.hf_dir)
    has_llama = "A" in arguments.workloads and importlib.util.find_spec("llama_cpp") is not None
    results, deadline = Results(), time.monotonic() + 60 * arguments.minutes
    print(f"contenders: {', '.join(server.name for server in servers)}{', ' + IN_PROCESS if has_llama else ''}")
    for turn in range(arguments.rounds):
        seed = arguments.seed + turn  # another one each round: no prefix cache answers for the last
        for server in servers:
            if server.name in results.failures or time.monotonic() > deadline:
                continue
            try:
                measure_server(server, arguments, seed, results, deadline)
            except (ServerFailed, HeadraceError) as error:
                results.failures[server.name] = str(error)
                print(f"{server.name} failed: {error}", flush=True)
        if has_llama and time.monotonic() < deadline:
            results.add("A", IN_PROCESS, measure_in_process(gguf, seed, arguments.share))
    return results


def ratios(results: Results, baseline: str) -> list[str]:
    """A table: medians, and each contender's output tokens/s and latencies as multiples of the baseline's."""
    lines = [f"{'':2}{'':<20}{'tok/s':>9}{'TTFT ms':>9}{'ITL ms':>8}   x tok/s  x TTFT   x ITL   (of {baseline})"]
    for workload, contenders in sorted(results.samples.items()):
        base = _medians(contenders[baseline]) if baseline in contenders else None
        for name, samples in contenders.items():
            own = _medians(samples)
            line = f"{workload:2}{name:<20}{own[0]:>9.1f}{own[1]:>9.1f}{own[2]:>8.2f}"
            if base is not None and all(base):
                line += "".join(f"{mine / theirs:>9.2f}" for mine, theirs in zip(own, base, strict=True))
            lines.append(line)
    return lines


def _medians(samples: Sequence[Sample]) -> tuple[float, float, float]:
    return (
        median(sample.output_tokens_per_s for sample in samples),
        median(sample.ttft_p50_ms for sample in samples),
        median(sample.itl_p50_ms for sample in samples),
    )


def default_baseline(results: Results) -> str:
    """The first peer with a server, else the first contender."""
    names = list(results.start_s)
    return next((name for name in names if not name.startswith("headrace")), names[0] if names else IN_PROCESS)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", type=_listed(tuple(_QUANTIZATION)), default=["int4", "int8", "bf16"])
    parser.add_argument("--workloads", type=_listed(tuple(WORKLOADS)), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=20.0, help="nothing new is measured after so long")
    parser.add_argument("--share", type=float, default=1.0, help="of each workload's requests, for shorter runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--baseline", default="", help="contender that ratios refer to; empty: the first peer found")
    parser.add_argument("--model-dir", type=Path, help="imported model with tokenizer.json; none: the demo model")
    parser.add_argument("--gguf", type=Path, help="what llama.cpp loads; none: model.gguf of the model directory")
    parser.add_argument("--hf-dir", type=Path, help="safetensors directory of the same model, for vLLM")
    parser.add_argument("--json", type=Path, help="write every sample here")
    parser.add_argument("--front-door", action="store_true", help="the engine in process against headrace serve")
    return parser.parse_args(argv)


def _listed(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        if unknown := sorted(set(found) - set(allowed)):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(allowed)}")
        return found

    return names


def main() -> None:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the server that is running, too
    arguments.model_dir = arguments.model_dir or ensure_demo_model(Path(".headrace/models"), print)
    if arguments.front_door:
        reports = {
            mode: front_door(
                _QUANTIZATION[mode],
                arguments.model_dir,
                rounds=arguments.rounds,
                seed=arguments.seed,
                minutes=arguments.minutes,
            )
            for mode in arguments.modes
        }
        for mode, report in reports.items():
            print(f"== headrace-{mode}\n{report}")
        content: object = {mode: asdict(report) for mode, report in reports.items()}
    else:
        results = compare(arguments)
        baseline = arguments.baseline or default_baseline(results)
        print("\n".join(ratios(results, baseline)))
        print("start to first answer: " + ", ".join(f"{n} {median(s):.1f} s" for n, s in results.start_s.items()))
        content = {"baseline": baseline, **asdict(results)}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
