"""A runner without a model, whose every token depends on every earlier token *as read back from the cache*.

Each scheduled token is written to the physical slot that the block table gives it; a drawn token is a hash of all
slots of its sequence in order. So a lost block, a wrong table row, a slot written twice or a stale prefix shows as a
wrong token.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b

import numpy as np

from common.events import TokenLogprobs
from engine_worker.kv_cache.manager import KvCacheManager
from engine_worker.sequence import Sequence
from engine_worker.step import PromptLogprobs, SampledToken, StepOutput, StepPlan

VOCAB_SIZE = 1000


def next_token(context: list[int]) -> int:
    """What this model says after ``context``."""
    digest = blake2b(np.asarray(context, dtype=np.int64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB_SIZE


class FakeRunner:
    """``fail`` names sequences whose execution fails, confined to them."""

    def __init__(self, kv_cache: KvCacheManager, fail: Callable[[Sequence], bool] = lambda sequence: False) -> None:
        self._tables = kv_cache.block_tables
        self._block_size = kv_cache.block_size
        self._memory = np.full(kv_cache.num_blocks * kv_cache.block_size, -1, dtype=np.int64)
        self._fail = fail
        self.plans: list[StepPlan] = []

    def execute(self, plan: StepPlan) -> StepOutput:
        self.plans.append(plan)
        sampled: list[SampledToken] = []
        failed: list[tuple[Sequence, str]] = []
        scores: list[PromptLogprobs] = []
        for item in plan.scheduled:
            positions = np.arange(item.start, item.start + item.num_tokens)
            self._memory[self._slots(item.sequence, positions)] = item.sequence.tokens[positions]
        for item in plan.scheduled:
            sequence, end = item.sequence, item.start + item.num_tokens
            if self._fail(sequence):
                failed.append((sequence, "told to fail"))
                continue
            context = self._memory[self._slots(sequence, np.arange(end))].tolist()
            assert context == sequence.tokens[:end].tolist(), f"{sequence} reads what it did not write"
            first, last = max(sequence.num_scored_tokens, item.start + 1), min(end, sequence.num_prompt_tokens - 1)
            if sequence.scores_prompt and first <= last:
                found = tuple(TokenLogprobs(logprob=-float(next_token(context[:p]))) for p in range(first, last + 1))
                scores.append(PromptLogprobs(sequence, first, found))
            if item.samples:
                sampled.append(SampledToken(sequence, next_token(context)))
        return StepOutput(sampled=tuple(sampled), prompt_logprobs=tuple(scores), failed=tuple(failed))

    def _slots(self, sequence: Sequence, positions: np.ndarray) -> np.ndarray:
        row = self._tables[sequence.block_table_row]
        blocks = row[positions // self._block_size]
        assert (positions < sequence.num_blocks * self._block_size).all(), f"{sequence} has no slot"
        slots: np.ndarray = blocks * self._block_size + positions % self._block_size
        return slots
