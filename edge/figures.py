"""Times, counts and outcome of one generation as its client saw it: metrics, the log line's fields, span attributes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from common.events import ChoiceFinished, Ended, Failed, Started, Tokens
from common.telemetry.genai import response_attributes
from common.telemetry.tracing import PastSpan, SpanEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from common.errors import HeadraceError
    from common.events import EngineRequest, Recorded
    from common.telemetry.metrics import EdgeMetrics
    from common.telemetry.tracing import Tracing
    from edge.request_context import RequestContext


class GenerationFigures:
    """Fed with every batch of events on its way to the client; `conclude` once at the end."""

    def __init__(
        self, metrics: EdgeMetrics, tracing: Tracing, context: RequestContext, request: EngineRequest, endpoint: str
    ) -> None:
        self.end: Ended | Failed | None = None
        self.error: HeadraceError | None = None  # why this edge could not bring the answer to its end
        self.goes_on_as = ""  # outcome of a request that goes on without this edge: handed_over, accepted
        self._metrics = metrics
        self._tracing = tracing
        self._context = context
        self._request = request
        self._endpoint = endpoint
        self._num_tokens = 0
        self._first_token_s: float | None = None  # unix time
        self._last_token_s = 0.0
        self._finish_reasons: dict[int, str] = {}
        self._started: Started | None = None
        self._inter_chunk = metrics.inter_chunk.labels(request.model)
        self._delivered = metrics.delivered_tokens.labels(request.model)

    def note(self, events: Sequence[Recorded]) -> None:
        """These events go to the client now."""
        num_tokens = 0
        for recorded in events:
            match recorded.event:
                case Tokens(token_ids=token_ids):
                    num_tokens += len(token_ids)
                case ChoiceFinished() as event:
                    self._finish_reasons[event.choice] = event.finish_reason.value
                case Started() as event:
                    self._started = event
                case Ended() | Failed() as event:
                    self.end = event
                case _:
                    pass
        if num_tokens:
            self._note_tokens(num_tokens)

    def conclude(self, num_events: int) -> None:
        """The answer is over, in whatever way."""
        model, context = self._request.model, self._context
        outcome = self._outcome()
        self._metrics.requests.labels(self._endpoint, model, outcome).inc()
        self._metrics.request_duration.labels(model).observe(context.elapsed_s())
        context.outcome |= {
            "outcome": outcome,
            "model": model,
            "endpoint": self._endpoint,
            "prompt_tokens": sum(map(len, self._request.prompts)),
            "delivered_tokens": self._num_tokens,
            "finish_reasons": self._reasons(),
            "events": num_events,
            **self._optional(),
        }
        self._trace(outcome)

    def _note_tokens(self, num_tokens: int) -> None:
        now = time.time()
        if self._first_token_s is None:
            self._first_token_s = now
            self._metrics.time_to_first_token.labels(self._request.model).observe(self._context.elapsed_s())
        else:
            self._inter_chunk.observe(now - self._last_token_s)
        self._last_token_s = now
        self._num_tokens += num_tokens
        self._delivered.inc(num_tokens)

    def _optional(self) -> dict[str, Any]:
        """Fields of the log line that not every generation has."""
        fields: dict[str, Any] = {}
        if self._request.request_id != self._context.request_id:  # a stream read again by another HTTP request
            fields["generation"] = self._request.request_id
        if self._request.tenant:
            fields["tenant"] = self._request.tenant
        if self._first_token_s is not None:
            fields["ttft_s"] = round(self._first_token_s - self._context.arrival_s, 4)
        if self._started is not None:
            fields |= {"worker": self._started.worker, "epoch": self._started.epoch}
        if self.end is not None:
            usage = self.end.usage
            fields |= {"completion_tokens": usage.completion_tokens, "cached_tokens": usage.cached_tokens}
        if isinstance(self.end, Failed):
            fields |= {"error_code": self.end.code, "error": self.end.message[:500]}
        elif self.error is not None:
            fields |= {"error_code": self.error.code, "error": self.error.message[:500]}
        return fields

    def _outcome(self) -> str:
        match self.end:
            case Ended(cancelled=None):
                return "ok"
            case Failed():
                return "error"
            case Ended():
                return "cancelled"
            case None if self.goes_on_as:
                return self.goes_on_as
            case None:
                return "cancelled" if self.error is None else "error"

    def _reasons(self) -> list[str]:
        return [reason for _, reason in sorted(self._finish_reasons.items())]

    def _trace(self, outcome: str) -> None:
        span = self._context.span
        if span is None or not self._tracing.enabled:
            return
        span.set_attribute("headrace.outcome", outcome)
        if self.end is not None:
            for key, value in response_attributes(self._request.model, self._reasons(), self.end.usage).items():
                span.set_attribute(key, value)
        if self._first_token_s is not None:
            first_byte: SpanEvent = ("first_byte_sent", self._first_token_s, {})
            self._tracing.record(PastSpan("relay", self._first_token_s, time.time(), events=(first_byte,)))
