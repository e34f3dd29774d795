"""A small engine with a fake runner, and sequences for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from common.events import SamplingParams
from engine_worker.config import SchedulerSettings
from engine_worker.engine import Engine
from engine_worker.kv_cache.manager import KvCacheManager
from engine_worker.scheduler.scheduler import Scheduler
from engine_worker.sequence import Sequence
from engine_worker.step import StepResult
from tests.unit.engine_worker.fake_runner import FakeRunner, next_token

MAX_MODEL_LEN = 256


class World:
    """An engine over ``num_blocks`` blocks; ``step`` checks every invariant after every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        prefix_caching: bool = True,
        max_model_len: int = MAX_MODEL_LEN,
        fail: Callable[[Sequence], bool] = lambda sequence: False,
        **settings: Any,
    ) -> None:
        self.settings = SchedulerSettings(**{"max_num_seqs": 8, "max_num_batched_tokens": 32, **settings})
        self.kv_cache = KvCacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=self.settings.max_num_seqs,
            max_model_len=max_model_len,
            enable_prefix_caching=prefix_caching,
        )
        self.runner = FakeRunner(self.kv_cache, fail)
        self.max_model_len = max_model_len
        self.scheduler = Scheduler(self.settings, self.kv_cache, max_model_len)
        self.engine = Engine(self.scheduler, self.kv_cache, self.runner)
        self.now = 1000.0
        self._ids = itertools.count(1)

    def sequence(
        self, prompt: int | list[int], *, max_tokens: int = 8, request_id: str = "", choice: int = 0, **more: Any
    ) -> Sequence:
        """``prompt``: tokens, or a length (then the tokens depend on it and on nothing else)."""
        seq_id = next(self._ids)
        tokens = [(7 * prompt + i) % 900 for i in range(prompt)] if isinstance(prompt, int) else prompt
        sampling = SamplingParams(max_tokens=max_tokens, **more.pop("sampling", {}))
        return Sequence(
            seq_id=seq_id,
            request_id=request_id or f"r{seq_id}",
            choice=choice,
            prompt_token_ids=tuple(tokens),
            sampling=sampling,
            max_model_len=self.max_model_len,
            **{"arrival_s": float(seq_id), **more},
        )

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.kv_cache.prepare(sequence)
        self.engine.add(sequences)

    def step(self) -> StepResult:
        self.now += 0.01
        result = self.engine.step(self.now)
        self.engine.check_invariants()
        return result

    def run(self, limit: int = 2000) -> list[StepResult]:
        """Steps until there is nothing to do."""
        results = []
        while self.engine.has_work:
            results.append(self.step())
            assert len(results) < limit, "the engine makes no progress"
        return results


def expected_output(sequence: Sequence) -> tuple[int, ...]:
    """What the sequence draws when nothing else exists: until max_tokens, the context or a stop token."""
    context = sequence.tokens[: sequence.num_prompt_tokens].tolist()
    sampling = sequence.sampling
    output: list[int] = []
    while len(output) < sampling.max_tokens and len(context) < MAX_MODEL_LEN:
        token = next_token(context)
        context.append(token)
        output.append(token)
        stops = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(sampling.eos_token_ids))
        if token in stops and len(output) > sampling.min_tokens:
            break
    return tuple(output)
