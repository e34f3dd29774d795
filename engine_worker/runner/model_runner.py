"""Computes a step's plan: inputs, forward pass, sampling."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine_worker.config import SchedulerSettings
from engine_worker.runner.kv_tensors import KvCachePlan
from engine_worker.runner.loading import LoadedModel
from engine_worker.sampling.sampler import Sampler
from engine_worker.step import StepOutput, StepPlan


class ModelRunner:
    """Owns the KV tensors and the step's input buffers. Used by the engine thread alone."""

    def __init__(
        self,
        model: LoadedModel,
        kv_plan: KvCachePlan,
        scheduler: SchedulerSettings,
        block_tables: npt.NDArray[np.int32],
        sampler: Sampler,
    ) -> None:
        """``block_tables``: the KV cache manager's own array, int32 [max_num_seqs, max_blocks_per_seq]."""
        raise NotImplementedError

    def execute(self, plan: StepPlan) -> StepOutput:
        """See `engine_worker.engine.Runner`. A sequence whose token ids or logits are not usable fails alone."""
        raise NotImplementedError
