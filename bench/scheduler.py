"""Cost of deciding and bookkeeping, without a model: microseconds a step at several batch sizes.

    python -m bench.scheduler

"decode" is a step in which every sequence draws one token (blocks are crossed and hashed on the way), "with prompt"
one in which a chunk of a long prompt is computed beside the decodes, "churn" one in which requests of a few tokens
come and go. Figures are the median and the 99th percentile of `Engine.step` with a runner that costs nothing.
"""

from __future__ import annotations

import itertools
import statistics
import time

from common.events import SamplingParams
from engine_worker.config import SchedulerSettings
from engine_worker.engine import Engine
from engine_worker.kv_cache.manager import KvCacheManager
from engine_worker.scheduler.scheduler import Scheduler
from engine_worker.sequence import Sequence
from engine_worker.step import SampledToken, StepOutput, StepPlan

MAX_MODEL_LEN = 8192
_ids = itertools.count()


class _FreeRunner:
    """Draws token 5 for whoever wants one; the time it takes is taken off by the caller."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def execute(self, plan: StepPlan) -> StepOutput:
        started = time.perf_counter()
        output = StepOutput(sampled=tuple(SampledToken(item.sequence, 5) for item in plan.scheduled if item.samples))
        self.spent_s = time.perf_counter() - started
        return output


def _sequence(num_prompt: int, max_tokens: int) -> Sequence:
    number = next(_ids)
    return Sequence(
        seq_id=number,
        request_id=f"r{number}",
        choice=0,
        prompt_token_ids=tuple((number * 31 + i) % 50_000 for i in range(num_prompt)),
        sampling=SamplingParams(max_tokens=max_tokens, eos_token_ids=(2,)),
        max_model_len=MAX_MODEL_LEN,
    )


class _Bench:
    def __init__(self, batch: int) -> None:
        self._kv_cache = KvCacheManager(
            num_blocks=40_000, block_size=32, max_num_seqs=batch + 1, max_model_len=MAX_MODEL_LEN
        )
        settings = SchedulerSettings(max_num_seqs=batch + 1)
        self._runner = _FreeRunner()
        self._engine = Engine(Scheduler(settings, self._kv_cache, MAX_MODEL_LEN), self._kv_cache, self._runner)
        self.add(*[_sequence(128, 4000) for _ in range(batch)])
        for _ in range(2 + batch * 128 // 256):
            self._engine.step(0.0)

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self._kv_cache.prepare(sequence)
        self._engine.add(sequences)

    def step_us(self) -> float:
        started = time.perf_counter()
        self._engine.step(0.0)
        return (time.perf_counter() - started - self._runner.spent_s) * 1e6


def _line(name: str, batch: int, times: list[float]) -> None:
    times.sort()
    print(f"{name:12s} {batch:5d} {statistics.median(times):9.1f} {times[int(len(times) * 0.99)]:9.1f}")


def main() -> None:
    print(f"{'':12s} {'batch':>5s} {'median us':>9s} {'p99 us':>9s}")
    for batch in (1, 8, 32, 64):
        bench = _Bench(batch)
        _line("decode", batch, [bench.step_us() for _ in range(1000)])
        bench.add(_sequence(8000, 1))
        _line("with prompt", batch, [bench.step_us() for _ in range(30)])
        times = []
        for _ in range(300):
            bench.add(_sequence(64, 2))
            times.append(bench.step_us())
        _line("churn", batch, times)


if __name__ == "__main__":
    main()
