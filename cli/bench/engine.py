"""``headrace bench engine``: the engine in this process, without a log, HTTP or text.

The same workloads as ``headrace bench serve``, greedy and of fixed length: the difference between the two commands is
what the way through the front door costs. Each run stands beside a bound: what reading the weights, or multiplying
bf16 matrices in plain torch, takes on this machine at this moment.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import torch
from pydantic import Field, field_validator

from cli.bench.figures import Figures, Objective, Outcome, summarise
from cli.bench.machine import Disturbance, Reference, measure_reference
from cli.bench.report import table
from cli.bench.workload import WORKLOADS, Lengths, Prose, Workload, WorkloadName
from common.config import Flags, Loaded, Settings, load
from common.errors import ConfigError
from common.events import SamplingParams
from common.telemetry.logging import configure_logging
from common.telemetry.settings import TelemetrySettings
from common.tokenization.tokenizer import Tokenizer
from engine_worker.assembly import Assembly, EngineSettings, load_engine
from engine_worker.config import ComputeSettings, KvCacheSettings, ModelSettings, SchedulerSettings
from engine_worker.runner.loading import LoadedModel
from engine_worker.sequence import Sequence as EngineSequence
from engine_worker.step import StepResult

ENGINE_GROUPS: Final[tuple[type[Settings], ...]] = (ModelSettings, ComputeSettings, SchedulerSettings, KvCacheSettings)
PHASES: Final = ("schedule", "prepare", "forward", "sample")


class BenchEngineSettings(Settings):
    """Which load is put on the engine."""

    workload: tuple[WorkloadName, ...] = Field(
        (), description="A to E of docs/benchmarks.md, one after the other, in place of the load described below."
    )
    concurrency: int = Field(8, ge=1, le=4096, description="Sequences in flight.")
    requests: int = Field(24, ge=1, le=1_000_000, description="Sequences that are measured.")
    prompt_tokens: str = Field("128", description="Prompt length: 128, 64-256 (uniform) or 16,128,1024 (one of these).")
    output_tokens: str = Field("128", description="Output length, in the same forms.")
    system_tokens: int = Field(0, ge=0, description="Length of a beginning that all prompts share.")
    bench_seed: Annotated[int, Flags(("--seed",))] = Field(1, description="Chooses prompts and lengths.")
    json_file: Annotated[Path | None, Flags(("--json",))] = Field(None, description="Write the figures here.")

    @field_validator("prompt_tokens", "output_tokens")
    @classmethod
    def _check_lengths(cls, value: str) -> str:
        Lengths.parse(value)
        return value

    def loads(self) -> dict[str, Workload]:
        """What is run, in order, by the name it is shown under."""
        if self.workload:
            return {name: WORKLOADS[name] for name in self.workload}
        one = Workload(self.concurrency, self.requests, self.prompt_tokens, self.output_tokens, self.system_tokens)
        return {"engine": one}


@dataclass(frozen=True, slots=True)
class EngineRun:
    """One workload's figures and where its time went."""

    figures: Figures
    steps: int
    phases_s: dict[str, float]  # of the steps: schedule, prepare, forward, sample; the rest of the wall time is ours
    bound_share: float  # time at the machine's reference rates / time taken
    other_cores: float  # kept busy by others meanwhile

    def lines(self) -> str:
        wall = self.figures.wall_s
        parts = [f"{name} {100 * self.phases_s[name] / wall:.1f} %" for name in PHASES]
        rest = 100 * (1 - sum(self.phases_s.values()) / wall)
        return "\n".join(
            [
                f"{'time':<20}{', '.join(parts)}, rest {rest:.1f} %, {self.steps} steps",
                f"{'bound / taken':<20}{self.bound_share:.2f}",
                f"{'others':<20}{self.other_cores:.2f} cores",
            ]
        )


def main(argv: Sequence[str], prog: str) -> int:
    loaded = load(
        [BenchEngineSettings, *ENGINE_GROUPS],
        argv,
        prog=prog,
        description=(__doc__ or "").strip(),
        defaults={"model": "demo"},
    )
    configure_logging("bench", TelemetrySettings(log_level="warning"))
    settings = loaded[BenchEngineSettings]
    assembly = load_engine(engine_settings(loaded))
    print(describe(assembly.model))
    load_of, prose = settings.loads(), Prose()
    check_fits(assembly, load_of)
    warm_up(assembly, prose)
    runs: dict[str, EngineRun] = {}
    references: dict[str, Reference] = {}
    for name, workload in load_of.items():
        references[name] = measure_reference()
        runs[name] = run(assembly, workload, prose, random.Random(f"{settings.bench_seed} {name}"), references[name])
        print(f"{table(name, runs[name].figures)}\n{runs[name].lines()}\n{'machine':<20}{references[name]}", flush=True)
    if settings.json_file is not None:
        report = {
            "settings": settings.model_dump(mode="json"),
            "model": model_facts(assembly.model),
            "workloads": {name: asdict(one) | {"machine": asdict(references[name])} for name, one in runs.items()},
        }
        settings.json_file.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


def engine_settings(loaded: Loaded) -> EngineSettings:
    return EngineSettings(
        loaded[ModelSettings], loaded[ComputeSettings], loaded[SchedulerSettings], loaded[KvCacheSettings]
    )


def describe(model: LoadedModel) -> str:
    facts = model_facts(model)
    return (
        f"{facts['name']}: {facts['dtype']}, quantization {facts['quantization']}, KV cache {facts['kv_cache_dtype']}, "
        f"backend {facts['backend']}, {facts['threads']} threads, {facts['weight_mb']:.0f} MB of weights, loaded in "
        f"{facts['load_s']:.1f} s"
    )


def model_facts(model: LoadedModel) -> dict[str, Any]:
    """What was measured, for reports."""
    return {
        "name": model.served_names[0],
        "dtype": model.dtype,
        "quantization": model.quantization,
        "kv_cache_dtype": model.kv_cache_dtype,
        "backend": model.backend,
        "threads": torch.get_num_threads(),
        "weight_mb": model.weight_bytes / 1e6,
        "load_s": model.load_s,
    }


def check_fits(assembly: Assembly, loads: dict[str, Workload]) -> None:
    """Raises `ConfigError` when a load's longest request is longer than the model's context."""
    for name, load_ in loads.items():
        longest = (
            load_.system_tokens + Lengths.parse(load_.prompt_tokens).high + Lengths.parse(load_.output_tokens).high
        )
        if longest > assembly.plan.max_model_len:
            raise ConfigError(
                f"workload: {name} has requests of {longest} tokens, the model takes {assembly.plan.max_model_len}"
            )


def warm_up(assembly: Assembly, prose: Prose) -> None:
    """Touch code and memory once."""
    drive(assembly, _sequences(assembly, Workload(4, 4, "16", "4"), prose, random.Random(0)), 4)


def run(assembly: Assembly, workload: Workload, prose: Prose, rng: random.Random, reference: Reference) -> EngineRun:
    """One workload from its first request to its last token."""
    sequences = _sequences(assembly, workload, prose, rng)
    model = assembly.model
    others = Disturbance()
    outcomes, results = drive(assembly, sequences, workload.concurrency)
    other_cores = others.cores()
    figures = summarise(outcomes, Objective())
    bound = sum(reference.bound_s(model.weight_bytes, model.num_params, tokens) for tokens in results.step_tokens)
    return EngineRun(figures, len(results.step_tokens), results.phases_s, bound / figures.wall_s, other_cores)


@dataclass(frozen=True, slots=True)
class Steps:
    """What the steps of a run say in sum."""

    step_tokens: list[int]  # computed in each step
    phases_s: dict[str, float]


def drive(assembly: Assembly, sequences: Sequence[EngineSequence], concurrency: int) -> tuple[list[Outcome], Steps]:
    """A closed loop: ``concurrency`` sequences are in the engine until none is left. Outcomes in the order given."""
    engine = assembly.engine
    waiting = iter(sequences)
    outcomes: dict[int, Outcome] = {}
    step_tokens: list[int] = []
    phases: Counter[str] = Counter()
    num_live = 0
    while True:
        for sequence in itertools.islice(waiting, concurrency - num_live):
            outcomes[sequence.seq_id] = Outcome(time.perf_counter())
            assembly.prepare(sequence)
            engine.add((sequence,))
            num_live += 1
        if not num_live:
            return list(outcomes.values()), Steps(step_tokens, {name: phases[name] for name in PHASES})
        result = engine.step(time.time())
        num_live -= _take(result, outcomes, time.perf_counter())
        step_tokens.append(result.num_tokens)
        phases.update({name: result.timings_s.get(name, 0.0) for name in PHASES})


def _take(result: StepResult, outcomes: dict[int, Outcome], now: float) -> int:
    """Note the tokens of one step; how many sequences ended."""
    for token in result.sampled:
        outcome = outcomes[token.sequence.seq_id]
        if outcome.last_s is None:
            outcome.first_s = now
        else:
            outcome.gaps_s.append(now - outcome.last_s)
        outcome.last_s = now
        outcome.num_chunks += 1
    for sequence, reason in result.failed:
        outcomes[sequence.seq_id].error = reason
        outcomes[sequence.seq_id].ended_s = now
    for sequence in result.finished:
        outcome = outcomes[sequence.seq_id]
        outcome.ended_s = now
        outcome.has_usage = True
        outcome.prompt_tokens = sequence.num_prompt_tokens
        outcome.cached_tokens = sequence.num_cached_tokens
        outcome.output_tokens = sequence.num_output_tokens
        outcome.finish_reason = str(sequence.finish_reason)
    return len(result.finished) + len(result.failed)


_seq_ids: Final = itertools.count(1)


def next_seq_id() -> int:
    """One that no sequence of this process has."""
    return next(_seq_ids)


def _sequences(assembly: Assembly, workload: Workload, prose: Prose, rng: random.Random) -> list[EngineSequence]:
    model = assembly.model
    tokenizer = Tokenizer.from_json(model.tokenizer_json, model.tokenizer_config)
    system = cut(tokenizer, prose, rng, workload.system_tokens)
    lengths = Lengths.parse(workload.prompt_tokens), Lengths.parse(workload.output_tokens)
    sequences = []
    for seq_id in itertools.islice(_seq_ids, workload.requests):
        sequences.append(
            EngineSequence(
                seq_id=seq_id,
                request_id=f"bench-{seq_id}",
                choice=0,
                prompt_token_ids=system + cut(tokenizer, prose, rng, lengths[0].draw(rng)),
                sampling=SamplingParams(max_tokens=lengths[1].draw(rng), temperature=0.0, ignore_eos=True),
                max_model_len=assembly.plan.max_model_len,
            )
        )
    return sequences


def cut(tokenizer: Tokenizer, prose: Prose, rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    """``num_tokens`` tokens of prose."""
    ids: list[int] = []
    while len(ids) < num_tokens:
        ids += tokenizer.encode(prose.words(rng, num_tokens), add_special_tokens=False)
    return tuple(ids[:num_tokens])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "headrace bench engine"))
