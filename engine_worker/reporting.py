"""What a worker tells the outside about itself: metrics, spans of ended requests, one log line a request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final

from common.events import CancelReason, Failed, FinishReason
from common.telemetry.logging import get_logger, request_context
from common.telemetry.metrics import WorkerMetrics
from common.telemetry.tracing import PastSpan, Tracing
from common.transport.records import AppendItem
from engine_worker.engine import EngineStats
from engine_worker.live_request import LiveRequest
from engine_worker.step import StepResult

log: Final = get_logger(__name__)


class Reporting:
    """Called from the I/O loop; keeps no state but counters."""

    def __init__(self, metrics: WorkerMetrics, tracing: Tracing, worker: str) -> None:
        self._metrics = metrics
        self._tracing = tracing
        self._worker = worker
        self._last_stats: EngineStats | None = None
        self._last_step_s = 0.0

    def claimed(self, *, is_takeover: bool) -> None:
        (self._metrics.takeovers if is_takeover else self._metrics.claims).inc()

    def computed_again(self, num_tokens: int) -> None:
        """A preempted or taken over context has to be computed again (but for what a prefix cache still holds)."""
        self._metrics.wasted_tokens.inc(num_tokens)

    def stepped(self, result: StepResult) -> None:
        """An engine step has come to the output stage."""
        self._last_step_s = result.t
        if result.num_tokens:
            self._metrics.iteration_tokens.observe(result.num_tokens)
        if result.sampled:
            self._metrics.step_sequences.observe(len(result.sampled))
        for phase, seconds in result.timings_s.items():
            self._metrics.step_seconds(phase).observe(seconds)

    def token_intervals(self, seconds: Iterable[float]) -> None:
        """Times between a choice's tokens."""
        for interval in seconds:
            self._metrics.inter_token_latency.observe(interval)

    def appended(self, items: Sequence[AppendItem], seconds: float) -> None:
        """One append call was answered."""
        self._metrics.append_seconds.observe(seconds)
        self._metrics.appended_events.inc(sum(len(item.events) for item in items))
        if self._last_step_s:
            self._metrics.output_lag.observe(max(0.0, time.time() - self._last_step_s))

    def log_failed(self) -> None:
        self._metrics.log_errors.inc()

    def cancelled(self, reason: CancelReason) -> None:
        self._metrics.cancels(reason.value).inc()

    def fenced(self) -> None:
        self._metrics.fenced.inc()

    def handed_over(self) -> None:
        self._metrics.handovers.inc()

    def draining(self) -> None:
        self._metrics.draining.set(1)

    def engine(self, stats: EngineStats, backlog: int) -> None:
        """Gauges now; counters by what was added since the last call."""
        last, self._last_stats = self._last_stats or _NO_STATS, stats
        metrics = self._metrics
        metrics.num_requests_running.set(stats.running)
        metrics.num_requests_waiting.set(stats.waiting)
        metrics.kv_cache_usage.set(stats.kv_usage)
        metrics.kv_blocks("used").set(stats.kv_blocks_used)
        metrics.kv_blocks("cached").set(stats.kv_blocks_cached)
        metrics.kv_blocks("free").set(stats.kv_blocks_total - stats.kv_blocks_used - stats.kv_blocks_cached)
        metrics.output_backlog.set(backlog)
        metrics.num_preemptions.inc(stats.preemptions - last.preemptions)
        metrics.prefix_cache_queries.inc(stats.prefix_cache_queries - last.prefix_cache_queries)
        metrics.prefix_cache_hits.inc(stats.prefix_cache_hits - last.prefix_cache_hits)
        metrics.generation_tokens.inc(stats.generation_tokens - last.generation_tokens)

    def ended(self, live: LiveRequest) -> None:
        """The terminal event of a request is in the log."""
        self._count(live)
        usage, reason = live.usage, _finished_reason(live)
        with request_context(live.request_id, trace=live.request.trace):
            log.info(
                "request ended",
                finished_reason=reason,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                epoch=live.epoch,
                events=len(live.events),
                seconds=round(time.time() - live.request.arrival_s, 4),
            )
        if self._tracing.enabled:
            self._trace(live, reason)

    def _count(self, live: LiveRequest) -> None:
        metrics, timeline, usage = self._metrics, live.timeline, live.usage
        arrival_s = live.request.arrival_s
        ended_s = timeline.ended_s or time.time()
        metrics.request_success(_finished_reason(live)).inc()
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.request_prompt_tokens.observe(usage.prompt_tokens)
        metrics.request_generation_tokens.observe(usage.completion_tokens)
        metrics.e2e_latency.observe(max(0.0, ended_s - arrival_s))
        if timeline.scheduled_s is not None:
            metrics.queue_time.observe(max(0.0, timeline.scheduled_s - arrival_s))
            metrics.inference_time.observe(max(0.0, ended_s - timeline.scheduled_s))
        if timeline.first_token_s is not None:
            metrics.time_to_first_token.observe(max(0.0, timeline.first_token_s - arrival_s))
            metrics.decode_time.observe(max(0.0, ended_s - timeline.first_token_s))
            if timeline.scheduled_s is not None:
                metrics.prefill_time.observe(max(0.0, timeline.first_token_s - timeline.scheduled_s))

    def _trace(self, live: LiveRequest, reason: str) -> None:
        """Back-dated spans: queue, prefill, decode, publish under one span of the whole."""
        timeline, request = live.timeline, live.request
        now, ended_s = time.time(), timeline.ended_s or time.time()
        failure = live.events[-1] if live.events and isinstance(live.events[-1], Failed) else None
        parent = self._tracing.record(
            PastSpan(
                "process request",
                timeline.claimed_s,
                now,
                attributes={
                    "request.id": live.request_id,
                    "headrace.worker": self._worker,
                    "headrace.epoch": live.epoch,
                    "headrace.preemptions": timeline.num_preemptions,
                    "gen_ai.request.model": request.model,
                    "gen_ai.response.finish_reasons": (reason,),
                    "gen_ai.usage.input_tokens": live.usage.prompt_tokens,
                    "gen_ai.usage.output_tokens": live.usage.completion_tokens,
                },
                error=failure.message if failure is not None else None,
            ),
            request.trace,
        )
        scheduled_s = timeline.scheduled_s or ended_s
        first_s = timeline.first_token_s or ended_s
        last_s = timeline.last_token_s or ended_s
        self._tracing.record(PastSpan("queue", request.arrival_s, scheduled_s), parent)
        if timeline.scheduled_s is not None:
            chunks = tuple((e.what, e.t, dict(e.detail)) for e in live.milestones())
            self._tracing.record(PastSpan("prefill", scheduled_s, first_s, events=chunks), parent)
        if timeline.first_token_s is not None:
            self._tracing.record(PastSpan("decode", first_s, last_s), parent)
            self._tracing.record(PastSpan("publish", last_s, now), parent)


_NO_STATS: Final = EngineStats(
    running=0,
    waiting=0,
    kv_blocks_total=0,
    kv_blocks_used=0,
    kv_blocks_cached=0,
    kv_usage=0.0,
    preemptions=0,
    prefix_cache_queries=0,
    prefix_cache_hits=0,
    prompt_tokens=0,
    generation_tokens=0,
    steps=0,
)


def _finished_reason(live: LiveRequest) -> str:
    if live.cancelled is not None:
        return "abort"
    if live.events and isinstance(live.events[-1], Failed):
        return "error"
    return "length" if FinishReason.LENGTH in live.finish_reasons else "stop"
