"""Who computes how many tokens in the next step."""

from __future__ import annotations

from common.events import FinishReason
from engine_worker.config import SchedulerSettings
from engine_worker.kv_cache.manager import KvCacheManager
from engine_worker.sequence import Sequence
from engine_worker.step import StepOutput, StepPlan, StepResult


class Scheduler:
    """Decides each step; holds the sequences that wait and run. Owned by the engine thread."""

    def __init__(self, settings: SchedulerSettings, kv_cache: KvCacheManager, max_model_len: int) -> None: ...

    @property
    def has_work(self) -> bool:
        raise NotImplementedError

    def add(self, sequences: tuple[Sequence, ...]) -> None:
        raise NotImplementedError

    def cancel(self, request_id: str) -> tuple[Sequence, ...]:
        raise NotImplementedError

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: int | None) -> bool:
        raise NotImplementedError

    def schedule(self, now: float) -> StepPlan:
        raise NotImplementedError

    def commit(self, plan: StepPlan, output: StepOutput, now: float, timings_s: dict[str, float]) -> StepResult:
        raise NotImplementedError

    def check_invariants(self) -> None:
        raise NotImplementedError
