"""A whole engine over a small random model."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from common.events import SamplingParams
from engine_worker.config import ComputeSettings, KvCacheSettings, ModelSettings, SchedulerSettings
from engine_worker.engine import Engine
from engine_worker.kv_cache.manager import KvCacheManager
from engine_worker.runner.kv_tensors import plan_kv_cache
from engine_worker.runner.loading import LoadedModel, load_engine_model
from engine_worker.runner.model_runner import ModelRunner
from engine_worker.sampling.sampler import Sampler
from engine_worker.scheduler.scheduler import Scheduler
from engine_worker.sequence import Sequence
from engine_worker.step import StepResult


def load(directory: Path, backend: str = "torch", **settings: Any) -> LoadedModel:
    """fp32 unless told otherwise; one thread, since threads that wait for each other crawl on a busy machine."""
    model = ModelSettings(model=str(directory), **{"dtype": "float32", **settings})
    return load_engine_model(model, ComputeSettings(backend=backend, num_threads=1))


class SmallWorld:
    """``steps`` keeps every step's result."""

    def __init__(
        self, model: LoadedModel, *, num_batched_tokens: int = 64, cache_mib: int = 4, cache_blocks: int | None = None
    ) -> None:
        """``cache_blocks``: exactly so many, instead of what ``cache_mib`` holds."""
        self.model = model
        settings = SchedulerSettings(
            max_num_seqs=8, max_num_batched_tokens=num_batched_tokens, max_prefill_tokens_beside_decodes=16
        )
        cache = KvCacheSettings(kv_cache_memory_bytes=cache_mib << 20)
        plan = plan_kv_cache(cache, model.ops, model.config, model.max_model_len)
        if cache_blocks is not None:
            plan = dataclasses.replace(plan, num_blocks=cache_blocks, num_tokens=cache_blocks * plan.block_size)
        self.kv_cache = KvCacheManager(
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=model.max_model_len,
        )
        runner = ModelRunner(self.model, plan, settings, self.kv_cache.block_tables, Sampler(model.vocab_size))
        scheduler = Scheduler(settings, self.kv_cache, model.max_model_len)
        self.engine = Engine(scheduler, self.kv_cache, runner)
        self.steps: list[StepResult] = []
        self._ids = itertools.count()

    def sequence(self, prompt: list[int], **sampling: Any) -> Sequence:
        number = next(self._ids)
        return Sequence(
            seq_id=number,
            request_id=f"r{number}",
            choice=0,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **sampling}),
            max_model_len=self.model.max_model_len,
        )

    def run(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.kv_cache.prepare(sequence)
        self.engine.add(sequences)
        while self.engine.has_work:
            self.steps.append(self.engine.step(0.0))
        self.engine.check_invariants()
