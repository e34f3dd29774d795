"""Computes a step's plan: inputs, forward pass, sampling."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine_worker.config import SchedulerSettings
from engine_worker.kernels.ops import KvCache
from engine_worker.runner.cuda_graphs import Capture, DecodeGraphs
from engine_worker.runner.inputs import Prepared, StepInputs
from engine_worker.runner.kv_tensors import KvCachePlan, allocate_kv
from engine_worker.runner.loading import LoadedModel
from engine_worker.runner.stale_blocks import StaleBlocks, not_finite
from engine_worker.sampling.logprobs import prompt_logprobs, prompt_positions
from engine_worker.sampling.sampler import Sampler, SamplerOutput
from engine_worker.sequence import Sequence
from engine_worker.step import PromptLogprobs, StepOutput, StepPlan

# Logits made at a time for prompt log probabilities, 16 MB: bounds the memory that a long prompt takes, and stays
# below the size from which the C library maps, and faults in, every allocation anew.
_SCORED_LOGITS: Final = 1 << 22
_NOT_FINITE: Final = "computing it gave numbers that are not finite (nan or infinity)"


class ModelRunner:
    """Owns the KV tensors and the step's input buffers. Used by the engine thread alone."""

    def __init__(
        self,
        model: LoadedModel,
        kv_plan: KvCachePlan,
        scheduler: SchedulerSettings,
        block_tables: npt.NDArray[np.int32],
        sampler: Sampler,
        clock: Callable[[], float] = time.perf_counter,
        capture: Capture | None = None,
    ) -> None:
        """``block_tables``: the KV cache manager's own array, int32 [max_num_seqs, max_blocks_per_seq].

        ``capture``: how decode steps are recorded; None: they are not.
        """
        self._decoder = model.decoder
        self._vocab_size = model.vocab_size
        self._sampler = sampler
        self._clock = clock
        spare_blocks = 0 if capture is None else 1  # what rows that pad a batch write to
        self._cache = allocate_kv(kv_plan, model.ops, model.config, spare_blocks)
        self._stale = StaleBlocks(self._cache, block_tables)
        self._checks_hidden = model.device.type == "cpu"
        self._graphs = (
            None if capture is None else DecodeGraphs(model.decoder, self._cache, scheduler.max_num_seqs, capture)
        )
        self._inputs = StepInputs(
            max_tokens=scheduler.step_tokens,
            max_sequences=scheduler.max_num_seqs,
            block_size=kv_plan.block_size,
            vocab_size=model.vocab_size,
            block_tables=block_tables,
            device=model.device,
            padding_block=kv_plan.num_blocks if spare_blocks else None,
        )

    @property
    def cache(self) -> KvCache:
        """The KV tensors, for those who measure with made-up contents."""
        return self._cache

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """See `engine_worker.engine.Runner`. A sequence whose token ids or logits are not usable fails alone."""
        started = self._clock()
        num_rows = self._graphs.num_rows(plan) if self._graphs else None
        self._stale.clear_for(plan)
        inputs = self._inputs.build(plan, num_rows)
        prepared = self._clock()
        hidden, logits = self._forward(inputs) if num_rows is None else self._replay(inputs, plan.num_tokens)
        forwarded = self._clock()
        failed = self._failed(plan, inputs, hidden)
        scores = self._score_prompts(plan, inputs, hidden, failed)
        sampled = self._sampler.sample(logits, inputs.sampling) if logits is not None else SamplerOutput(())
        failed = dict(sampled.failed) | failed
        for sequence in failed:
            self._stale.leave(sequence)
        return StepOutput(
            sampled=tuple(token for token in sampled.sampled if token.sequence not in failed),
            prompt_logprobs=scores,
            failed=tuple(failed.items()),
            timings_s={
                "prepare": prepared - started,
                "forward": forwarded - prepared,
                "sample": self._clock() - forwarded,
            },
        )

    def _failed(self, plan: StepPlan, inputs: Prepared, hidden: Tensor) -> dict[Sequence, str]:
        """Sequences that cannot go on, with the reason, before anything is made of their hidden states."""
        failed = dict(inputs.failed)
        # On a GPU the sampler finds them when they come to draw a token: looking here waits for the device once more.
        if self._checks_hidden or any(item.sequence.scores_prompt for item in plan.scheduled):
            for sequence in not_finite(plan, hidden):
                failed.setdefault(sequence, _NOT_FINITE)
        return failed

    def _replay(self, inputs: Prepared, num_tokens: int) -> tuple[Tensor, Tensor | None]:
        """`_forward` for a padded batch: its first ``num_tokens`` rows count."""
        assert self._graphs is not None
        hidden, logits = self._graphs.run(inputs.token_ids, inputs.meta)
        rows = inputs.sampling_rows
        if not inputs.sampling:
            return hidden[:num_tokens], None
        return hidden[:num_tokens], logits[:num_tokens] if rows is None else logits[rows]

    def _forward(self, inputs: Prepared) -> tuple[Tensor, Tensor | None]:
        """Hidden states of the step's tokens, and the logits of the rows that draw a token, if any does."""
        rows = inputs.sampling_rows
        hidden = self._decoder.hidden(inputs.token_ids, self._cache, inputs.meta)
        if not inputs.sampling:
            return hidden, None
        return hidden, self._decoder.logits(hidden if rows is None else hidden[rows])

    def _score_prompts(
        self, plan: StepPlan, inputs: Prepared, hidden: Tensor, failed: Container[Sequence]
    ) -> tuple[PromptLogprobs, ...]:
        scores = []
        num_rows = max(_SCORED_LOGITS // self._vocab_size, 16)
        for item, first in zip(plan.scheduled, inputs.first_token.tolist(), strict=True):
            positions = prompt_positions(item) if item.sequence.scores_prompt else range(0)
            if not positions or item.sequence in failed:
                continue
            # Position p is scored by the logits of p - 1, which is token p - 1 - start of this step's chunk.
            offset = first - item.start - 1
            parts = []
            for begin in range(positions.start, positions.stop, num_rows):
                part = range(begin, min(begin + num_rows, positions.stop))
                logits = self._decoder.logits(hidden[part.start + offset : part.stop + offset])
                parts.append(prompt_logprobs(logits, item.sequence, part))
            logprobs = tuple(score for part_scores in parts for score in part_scores.logprobs)
            scores.append(PromptLogprobs(item.sequence, positions.start, logprobs))
        return tuple(scores)
