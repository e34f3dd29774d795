"""``headrace bench long-prompts``: what long prompts do to the streams that run beside them, and the other way round.

Some sequences stream; in the midst of that long prompts arrive, all at once. Measured are the gaps between tokens of
the streams for as long as prompts are being computed, and how long each prompt waits for its first token. One row for
each bound of the prompt tokens in a step that also decodes (`max_prefill_tokens_beside_decodes`): small chunks keep the
gaps short, large ones bring the prompts home sooner.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field

from cli.bench.engine import ENGINE_GROUPS, cut, describe, engine_settings, model_facts, next_seq_id, warm_up
from cli.bench.figures import percentile
from cli.bench.machine import Disturbance
from cli.bench.workload import Prose
from common.config import Flags, Settings, load
from common.errors import ConfigError
from common.events import SamplingParams
from common.telemetry.logging import configure_logging
from common.telemetry.settings import TelemetrySettings
from common.tokenization.tokenizer import Tokenizer
from engine_worker.assembly import Assembly, assemble, load_engine
from engine_worker.sequence import Sequence as EngineSequence
from engine_worker.step import StepResult

_HEAD_START: Final = 16  # tokens of every stream before the prompts arrive
_STREAM_PROMPT: Final = 128


class LongPromptsSettings(Settings):
    """Who streams and what arrives."""

    streams: int = Field(8, ge=1, le=1024, description="Sequences that decode all the time.")
    prompts: int = Field(8, ge=1, le=1024, description="Prompts that arrive at once.")
    prompt_length: int = Field(4000, ge=2, le=1_000_000, description="Tokens of each of these prompts.")
    prompt_logprobs: int = Field(
        -1, ge=-1, le=100, description="Log probabilities wanted at each position of these prompts; -1: none."
    )
    chunks: tuple[int, ...] = Field(
        (), description="Values of max_prefill_tokens_beside_decodes to compare; empty: the one that is set."
    )
    bench_seed: Annotated[int, Flags(("--seed",))] = Field(1, description="Chooses the prompts.")
    json_file: Annotated[Path | None, Flags(("--json",))] = Field(None, description="Write the figures here.")


@dataclass(frozen=True, slots=True)
class Row:
    """One run. Times in milliseconds; gaps are those that ended while prompts were being computed."""

    chunk: int
    gaps: int
    gap_p50: float
    gap_p99: float
    gap_max: float
    quiet_gap_p50: float  # before the prompts came
    ttft_first: float
    ttft_p50: float
    ttft_last: float
    prompt_tokens_per_s: float
    stream_tokens_per_s: float  # of all streams together, meanwhile
    other_cores: float

    def line(self) -> str:
        return (
            f"{self.chunk:>6}{self.gap_p50:>9.1f}{self.gap_p99:>9.1f}{self.gap_max:>9.1f}{self.quiet_gap_p50:>9.1f}"
            f"{self.ttft_first:>10.0f}{self.ttft_p50:>9.0f}{self.ttft_last:>9.0f}"
            f"{self.prompt_tokens_per_s:>10.0f}{self.stream_tokens_per_s:>10.1f}{self.other_cores:>8.2f}"
        )


HEAD: Final = (
    f"{'chunk':>6}{'ITL p50':>9}{'p99':>9}{'max':>9}{'quiet':>9}{'TTFT 1st':>10}{'p50':>9}{'last':>9}"
    f"{'prompt/s':>10}{'stream/s':>10}{'others':>8}"
)


def main(argv: Sequence[str], prog: str) -> int:
    loaded = load(
        [LongPromptsSettings, *ENGINE_GROUPS],
        argv,
        prog=prog,
        description=(__doc__ or "").strip(),
        defaults={"model": "demo"},
    )
    configure_logging("bench", TelemetrySettings(log_level="warning"))
    settings, engine = loaded[LongPromptsSettings], engine_settings(loaded)
    first = load_engine(engine)
    if settings.prompt_length + 1 > first.plan.max_model_len:
        raise ConfigError(
            f"prompt_length is {settings.prompt_length}, the model takes {first.plan.max_model_len} with an answer"
        )
    print(f"{describe(first.model)}\nmilliseconds\n{HEAD}", flush=True)
    prose, rows = Prose(), []
    warm_up(first, prose)
    scheduler = engine.scheduler.for_device(is_cpu=first.model.device.type == "cpu")
    for chunk in settings.chunks or (scheduler.chunk_tokens,):
        bounded = scheduler.model_copy(update={"max_prefill_tokens_beside_decodes": chunk})
        fresh = assemble(first.model, first.plan, bounded, enable_prefix_caching=False)
        rows.append(Run(fresh, settings, prose).measure(chunk))
        print(rows[-1].line(), flush=True)
    if settings.json_file is not None:
        report = {
            "settings": settings.model_dump(mode="json"),
            "model": model_facts(first.model),
            "rows": [asdict(row) for row in rows],
        }
        settings.json_file.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 0


class Run:
    """Streams and prompts on one fresh engine."""

    def __init__(self, assembly: Assembly, settings: LongPromptsSettings, prose: Prose) -> None:
        self._assembly = assembly
        self._settings = settings
        self._prose = prose
        self._rng = random.Random(settings.bench_seed)
        self._tokenizer = Tokenizer.from_json(assembly.model.tokenizer_json, assembly.model.tokenizer_config)
        self._last_s: dict[int, float] = {}  # of each stream's last token
        self._gaps_s: list[float] = []
        self._ttfts_s: list[float] = []

    def measure(self, chunk: int) -> Row:
        settings, engine = self._settings, self._assembly.engine
        longest = self._assembly.plan.max_model_len - _STREAM_PROMPT
        self._add([self._sequence(_STREAM_PROMPT, longest) for _ in range(settings.streams)])
        while len(self._gaps_s) < _HEAD_START * settings.streams:
            self._note(engine.step(time.time()), 0.0, frozenset())
        quiet, self._gaps_s = self._gaps_s, []
        prompts = [self._sequence(settings.prompt_length, 1, settings.prompt_logprobs) for _ in range(settings.prompts)]
        wanted = frozenset(item.seq_id for item in prompts)
        others, started = Disturbance(), time.perf_counter()
        self._add(prompts)
        while len(self._ttfts_s) < settings.prompts:
            self._note(engine.step(time.time()), started, wanted)
        wall_s = time.perf_counter() - started
        return Row(
            chunk=chunk,
            gaps=len(self._gaps_s),
            gap_p50=1000 * percentile(self._gaps_s, 50),
            gap_p99=1000 * percentile(self._gaps_s, 99),
            gap_max=1000 * max(self._gaps_s),
            quiet_gap_p50=1000 * percentile(quiet, 50),
            ttft_first=1000 * self._ttfts_s[0],
            ttft_p50=1000 * percentile(self._ttfts_s, 50),
            ttft_last=1000 * self._ttfts_s[-1],
            prompt_tokens_per_s=settings.prompts * settings.prompt_length / wall_s,
            stream_tokens_per_s=len(self._gaps_s) / wall_s,
            other_cores=others.cores(),
        )

    def _add(self, sequences: Sequence[EngineSequence]) -> None:
        for sequence in sequences:
            self._assembly.prepare(sequence)
        self._assembly.engine.add(sequences)

    def _note(self, result: StepResult, started_s: float, prompts: frozenset[int]) -> None:
        now = time.perf_counter()
        for token in result.sampled:
            seq_id = token.sequence.seq_id
            if seq_id in prompts:
                self._ttfts_s.append(now - started_s)
                continue
            if seq_id in self._last_s:
                self._gaps_s.append(now - self._last_s[seq_id])
            self._last_s[seq_id] = now

    def _sequence(self, length: int, max_tokens: int, prompt_logprobs: int = -1) -> EngineSequence:
        seq_id = next_seq_id()
        return EngineSequence(
            seq_id=seq_id,
            request_id=f"bench-{seq_id}",
            choice=0,
            prompt_token_ids=cut(self._tokenizer, self._prose, self._rng, length),
            sampling=SamplingParams(
                max_tokens=max_tokens,
                temperature=0.0,
                ignore_eos=True,
                prompt_logprobs=None if prompt_logprobs < 0 else prompt_logprobs,
            ),
            max_model_len=self._assembly.plan.max_model_len,
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "headrace bench long-prompts"))
