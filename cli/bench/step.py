"""``headrace bench step``: one engine step by part, at several batch sizes and context lengths.

Parts, in milliseconds (medians over the steps): schedule, prepare (inputs), forward, sample, commit (the rest of the
engine's step), report (what the engine thread hands over), publish (text, events and metrics, on the I/O thread, with
a log that takes everything at once). Everything but forward is overhead. Contexts are not computed: their keys and
values are made up, which costs the same to read. ``bound`` is what plain torch would need on this machine at this
moment to read the weights once, or to multiply as much.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import torch
from pydantic import Field, field_validator
from torch import Tensor

from cli.bench.engine import ENGINE_GROUPS, describe, engine_settings, model_facts
from cli.bench.figures import percentile
from cli.bench.machine import Disturbance, Reference, measure_reference
from common.config import Flags, Settings, load
from common.errors import ConfigError
from common.events import EngineRequest, SamplingParams
from common.telemetry.logging import configure_logging
from common.telemetry.metrics import WorkerMetrics
from common.telemetry.settings import TelemetrySettings
from common.telemetry.tracing import Tracing
from common.tokenization.tokenizer import Tokenizer
from common.transport.records import AppendItem, AppendOutcome, AppendStatus, Owned
from engine_worker.assembly import EngineSettings, assemble
from engine_worker.config import SchedulerSettings
from engine_worker.engine import Engine
from engine_worker.handoff import Commands, StepReports
from engine_worker.output_stage import OutputStage
from engine_worker.reporting import Reporting
from engine_worker.resume import Resumer
from engine_worker.runner.kv_tensors import KvCachePlan
from engine_worker.runner.loading import LoadedModel, load_engine_model
from engine_worker.runner.model_runner import ModelRunner
from engine_worker.scheduler.scheduler import Scheduler
from engine_worker.sequence import Sequence as EngineSequence
from engine_worker.step import SampledToken, StepOutput, StepPlan, StepResult

PARTS: Final = ("schedule", "prepare", "forward", "sample", "commit", "report", "publish")
_MOST_SEQUENCES: Final = 4096  # that a scheduler takes
_MOST_TOKENS: Final = 1_048_576  # of a step: all prompts of a row are computed in one
_NOISE: Final = 0x3C  # as both bytes of a bfloat16: 0.011


class BenchStepSettings(Settings):
    """Which steps are taken."""

    batch: tuple[int, ...] = Field((1, 8, 32, 64), description="Sequences that decode in one step, 1 to 4096.")
    context: tuple[int, ...] = Field((128, 1024), description="Tokens that each of them has before it, at least 1.")
    prefill: tuple[int, ...] = Field((512,), description="Prompt lengths computed in one step, at least 1.")
    seconds: float = Field(1.0, gt=0, le=600, description="Time for each row.")
    json_file: Annotated[Path | None, Flags(("--json",))] = Field(None, description="Write the figures here.")

    @field_validator("batch")
    @classmethod
    def _check_batches(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not all(1 <= size <= _MOST_SEQUENCES for size in value):
            raise ValueError(f"each should be 1 to {_MOST_SEQUENCES}")
        return value

    @field_validator("context", "prefill")
    @classmethod
    def _check_lengths(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(length < 1 for length in value):
            raise ValueError("each should be at least 1")
        return value


class TakesAll:
    """A log that answers at once: what is measured is our own work."""

    async def append(self, items: Sequence[AppendItem]) -> list[AppendOutcome]:
        return [AppendOutcome(i.request_id, AppendStatus.APPENDED, i.first_n - 1 + len(i.events)) for i in items]

    async def release(self, request_id: str) -> bool:
        return bool(request_id)


class MadeUpPrompts:
    """A runner that computes single tokens and skips prompts, whose keys and values are made up."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        _fill(runner.cache)

    def execute(self, plan: StepPlan) -> StepOutput:
        if all(item.num_tokens == 1 for item in plan.scheduled):
            return self._runner.execute(plan)
        return StepOutput(tuple(SampledToken(item.sequence, 1) for item in plan.scheduled if item.samples))


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of step."""

    name: str
    num_tokens: int  # computed in a step
    num_steps: int
    parts_ms: dict[str, float]
    best_forward_ms: float
    bound_ms: float

    @property
    def total_ms(self) -> float:
        return sum(self.parts_ms.values())

    @property
    def overhead_ms(self) -> float:
        """Everything but forward, on both threads."""
        return self.total_ms - self.parts_ms["forward"]

    def line(self) -> str:
        parts = "".join(f"{self.parts_ms[part]:>9.3f}" for part in PARTS)
        rate = 1000 * self.num_tokens / (self.total_ms - self.parts_ms["publish"])  # the I/O thread works beside
        share = 100 * self.overhead_ms / self.total_ms
        bound = self.bound_ms / self.parts_ms["forward"]
        return f"{self.name:<14}{parts}{self.overhead_ms:>9.3f}{share:>6.1f} %{rate:>9.0f}{bound:>7.2f}"


def main(argv: Sequence[str], prog: str) -> int:
    loaded = load(
        [BenchStepSettings, *ENGINE_GROUPS],
        argv,
        prog=prog,
        description=(__doc__ or "").strip(),
        defaults={"model": "demo"},
    )
    configure_logging("bench", TelemetrySettings(log_level="warning"))
    settings, engine = loaded[BenchStepSettings], engine_settings(loaded)
    model = load_engine_model(engine.model, engine.compute)
    _check_fits(settings, model)
    reference = measure_reference()
    print(f"{describe(model)}\nmachine: {reference}")
    print(f"{'':<14}{''.join(f'{part:>9}' for part in PARTS)} overhead  share    tok/s  bound")
    others, rows = Disturbance(), []
    for batch, context in itertools.product(settings.batch, settings.context):
        rows.append(measure_decode(model, engine, batch, context, seconds=settings.seconds, reference=reference))
        print(rows[-1].line(), flush=True)
    for tokens in settings.prefill:
        rows.append(measure_prefill(model, engine, tokens, seconds=settings.seconds, reference=reference))
        print(rows[-1].line(), flush=True)
    other_cores = others.cores()
    print(f"others kept {other_cores:.2f} cores busy; at the end the machine {measure_reference()}")
    if settings.json_file is not None:
        report = {
            "settings": settings.model_dump(mode="json"),
            "model": model_facts(model),
            "machine": asdict(reference) | {"other_cores": other_cores},
            "rows": [asdict(row) | {"total_ms": row.total_ms, "overhead_ms": row.overhead_ms} for row in rows],
        }
        settings.json_file.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


def measure_decode(
    model: LoadedModel, settings: EngineSettings, batch: int, context: int, *, seconds: float, reference: Reference
) -> Row:
    """``batch`` sequences, each with ``context`` tokens before it, draw one token a step."""
    room = _room(model, context)
    bench = _Bench(model, settings, batch, context + room, skips_prompts=True)
    bench.add([bench.request(context, room) for _ in range(batch)])
    bench.step()  # the prompts, all of them
    bench.step()
    # The context grows by a token a step: stop before that shows.
    samples = _repeat(bench.step, seconds, most=min(room - 3, max(32, context // 4)))
    return _row(f"{batch} @{context}", batch, samples, model, reference)


def measure_prefill(
    model: LoadedModel, settings: EngineSettings, tokens: int, *, seconds: float, reference: Reference
) -> Row:
    """One prompt of ``tokens`` tokens in one step, its first token drawn."""
    bench = _Bench(model, settings, 1, tokens + 1, skips_prompts=False)

    def step() -> dict[str, float]:
        bench.add([bench.request(tokens, 1)])
        return bench.step()

    step()
    return _row(f"prefill {tokens}", tokens, _repeat(step, seconds, most=100), model, reference)


class _Bench:
    """An engine and an output stage for steps of up to ``batch`` sequences of up to ``length`` tokens."""

    def __init__(
        self, model: LoadedModel, settings: EngineSettings, batch: int, length: int, *, skips_prompts: bool
    ) -> None:
        scheduler = _all_at_once(batch, length)
        block_size = settings.kv_cache.block_size
        num_blocks = batch * (-(-length // block_size) + 2)
        plan = KvCachePlan(num_blocks, block_size, 0, num_blocks * block_size, length)
        parts = assemble(model, plan, scheduler, enable_prefix_caching=False)
        runner = MadeUpPrompts(parts.runner) if skips_prompts else parts.runner
        self._engine = Engine(Scheduler(scheduler, parts.kv_cache, length), parts.kv_cache, runner)
        self._reports = StepReports(1000)
        self._loop = asyncio.new_event_loop()
        reporting = Reporting(WorkerMetrics("bench"), Tracing.off(), "bench")
        self._stage = OutputStage(TakesAll(), Commands(), self._reports, reporting)
        self._stage.stop()  # its run() then writes what there is and returns
        tokenizer = Tokenizer.from_json(model.tokenizer_json, model.tokenizer_config)
        self._resumer = Resumer(tokenizer, "bench", length, itertools.count(1).__next__)
        self._vocab_size = model.vocab_size
        self._rng = random.Random(1)
        self._numbers = itertools.count(1)

    def request(self, num_prompt: int, max_tokens: int) -> EngineRequest:
        return EngineRequest(
            request_id=f"0-{next(self._numbers)}",
            model="bench",
            prompts=(tuple(self._rng.randrange(self._vocab_size) for _ in range(num_prompt)),),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True),
        )

    def add(self, requests: Sequence[EngineRequest]) -> None:
        sequences: list[EngineSequence] = []
        for request in requests:
            resumed = self._resumer.resume(Owned(request, 1, 0, (), None, 0, 0.0), time.time())
            self._stage.adopt(resumed)
            sequences += resumed.sequences
        self._engine.add(sequences)

    def step(self) -> dict[str, float]:
        """Seconds of each part of one step."""
        clock = time.perf_counter
        started = clock()
        result = self._engine.step(time.time())
        stepped = clock()
        self._engine.stats()
        self._reports.put(result)
        reported = clock()
        self._loop.run_until_complete(self._stage.run())
        return _parts(result, stepped - started, reported - stepped, clock() - reported)


def _parts(result: StepResult, step_s: float, report_s: float, publish_s: float) -> dict[str, float]:
    parts = {part: result.timings_s.get(part, 0.0) for part in PARTS}
    parts["commit"] = step_s - sum(parts[part] for part in ("schedule", "prepare", "forward", "sample"))
    return parts | {"report": report_s, "publish": publish_s}


def _all_at_once(batch: int, length: int) -> SchedulerSettings:
    """Every prompt is scheduled in the first step, so that all sequences then have the same length."""
    tokens = max(16, batch * length)
    return SchedulerSettings(
        max_num_seqs=batch,
        max_num_batched_tokens=tokens,
        max_prefill_tokens_beside_decodes=tokens,
        long_prefill_token_threshold=tokens,
    )


def _repeat(step: Any, seconds: float, *, most: int) -> list[dict[str, float]]:
    deadline = time.perf_counter() + seconds
    samples = [step()]
    while len(samples) < most and time.perf_counter() < deadline:
        samples.append(step())
    return samples


def _row(
    name: str, num_tokens: int, samples: Sequence[dict[str, float]], model: LoadedModel, reference: Reference
) -> Row:
    return Row(
        name=name,
        num_tokens=num_tokens,
        num_steps=len(samples),
        parts_ms={part: 1000 * percentile([sample[part] for sample in samples], 50) for part in PARTS},
        best_forward_ms=1000 * min(sample["forward"] for sample in samples),
        bound_ms=1000 * reference.bound_s(model.weight_bytes, model.num_params, num_tokens),
    )


def _fill(cache: Any) -> None:
    """Memory that was never written to is one page of zeros, which reads faster than a cache."""
    # A dataclass of the operators' own, with its tensors in fields, in lists, or in such again.
    for field in dataclasses.fields(cache):
        value = getattr(cache, field.name)
        for memory in value if isinstance(value, list | tuple) else [value]:
            if isinstance(memory, Tensor):
                memory.fill_(_NOISE if memory.dtype in (torch.uint8, torch.int8) else 0.01)
            elif dataclasses.is_dataclass(memory):
                _fill(memory)


def _room(model: LoadedModel, context: int) -> int:
    """Tokens that a sequence may draw behind ``context``."""
    return min(1024, model.max_model_len - context)


def _check_fits(settings: BenchStepSettings, model: LoadedModel) -> None:
    """Raises `ConfigError` for lengths that the model does not take."""
    longest = max((*(length + 64 for length in settings.context), *(length + 1 for length in settings.prefill)))
    if longest > model.max_model_len:
        raise ConfigError(f"context, prefill: {longest} tokens are needed, the model takes {model.max_model_len}")
    for batch, context in itertools.product(settings.batch, settings.context):
        most = batch * (context + _room(model, context))
        if most > _MOST_TOKENS:
            raise ConfigError(
                f"batch, context: {batch} of {context} need {most} tokens in a step, {_MOST_TOKENS} at most"
            )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "headrace bench step"))
