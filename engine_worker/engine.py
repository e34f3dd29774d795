"""The engine: a scheduler that decides, a runner that computes, and the step that joins them. No I/O, no threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from common.events import FinishReason
from engine_worker.kv_cache.manager import KvCacheManager
from engine_worker.scheduler.scheduler import Scheduler
from engine_worker.scheduler.stopping import Ending
from engine_worker.sequence import Sequence
from engine_worker.step import StepOutput, StepPlan, StepResult


class Runner(Protocol):
    """Computes a plan: writes K and V of every scheduled token, draws one token for each sequence that samples."""

    def execute(self, plan: StepPlan) -> StepOutput:
        """An exception that can be told apart by sequence comes back in ``failed``; any other is raised."""
        ...


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges at this moment, and counters since the start."""

    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_used: int  # referenced by a sequence; cached blocks nobody uses count as free
    kv_blocks_cached: int  # free, but their content can be found by a prefix
    kv_usage: float  # used / total
    preemptions: int
    prefix_cache_queries: int  # tokens looked up at admission
    prefix_cache_hits: int  # of them, found
    prompt_tokens: int  # computed for prompts and recomputed contexts
    generation_tokens: int  # drawn
    steps: int


class Engine:
    """One model's step loop. Every method is called from the engine thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        kv_cache: KvCacheManager,
        runner: Runner,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._scheduler = scheduler
        self._kv_cache = kv_cache
        self._runner = runner
        self._clock = clock
        self.before_execute: Callable[[StepPlan], None] = lambda plan: None
        """Called in each step that computes something, with what it is."""

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self._scheduler.has_work

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue new or resumed sequences. Call ``KvCacheManager.prepare`` on them first, off the step loop.

        Raises `ContextOverflow`, before any is queued, when one can never fit into the context or the cache.
        """
        self._scheduler.add(tuple(sequences))

    def cancel(self, request_id: str) -> tuple[Sequence, ...]:
        """Drop all sequences of a request; they free their blocks at once. Unknown ids give ()."""
        return self._scheduler.cancel(request_id)

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> bool:
        """End one sequence from outside (a stop string). False, and nothing changed, when it has already ended."""
        return self._scheduler.finish(sequence, Ending(reason, stop_reason))

    def step(self, now: float) -> StepResult:
        """One step: schedule, compute, commit. ``now`` is unix time in seconds.

        Raises whatever the runner raises that is not confined to sequences; the engine is then not to be used again.
        """
        started = self._clock()
        plan = self._scheduler.schedule()
        if plan.scheduled:
            self.before_execute(plan)
        scheduled = self._clock()
        output = self._runner.execute(plan) if plan.scheduled else StepOutput(sampled=())
        executed = self._clock()
        timings = {"schedule": scheduled - started, "execute": executed - scheduled, **output.timings_s}
        return self._scheduler.commit(plan, output, now + executed - started, timings)

    def stats(self) -> EngineStats:
        """Cheap enough to be read after every step."""
        usage = self._kv_cache.usage()
        counters = self._scheduler.counters
        return EngineStats(
            running=len(self._scheduler.roster.running),
            waiting=len(self._scheduler.roster.waiting),
            kv_blocks_total=usage.total,
            kv_blocks_used=usage.used,
            kv_blocks_cached=usage.cached,
            kv_usage=usage.used / usage.total,
            preemptions=counters.preemptions,
            prefix_cache_queries=usage.queries,
            prefix_cache_hits=usage.hits,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            steps=counters.steps,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError when blocks or sequences are not accounted for exactly once."""
        self._scheduler.check_invariants()
