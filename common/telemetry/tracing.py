"""Traces: one waterfall a request across edge, log and worker.

`Tracing` is built once where a process is joined and passed to the parts. Without an endpoint it is `Tracing.off()`:
spans are the API's no-op ones, nothing is sent and no thread runs. With one, ended spans go to a bounded queue that a
thread empties; a full queue drops spans, it never makes a request wait.

Between processes the context travels as a plain dict (``EngineRequest.trace``)::

    edge    with tracing.request("POST /v1/chat/completions", request_id, client_headers) as span:
                request = replace(request, trace=tracing.inject())
    worker  when it ended:  parent = tracing.record(PastSpan("process requests", start_s, end_s), request.trace)
                            tracing.record(PastSpan("prefill", t0, t1), parent)

The worker records back-dated spans from times that it keeps anyway: no tracing happens in the step loop.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.telemetry.settings import TelemetrySettings
from common.telemetry.trace_ids import trace_id_of, traceparent_trace_id

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, AttributeValue]
Carrier = Mapping[str, str]  # W3C traceparent and tracestate
SpanEvent = tuple[str, float, Attributes]  # name, unix time, attributes

_ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_next_root: ContextVar[int | None] = ContextVar("headrace_next_root_trace_id", default=None)
_propagator: Final = TraceContextTextMapPropagator()
_NO_SPAN: Final = nullcontext(trace.INVALID_SPAN)


class RequestIdGenerator(RandomIdGenerator):
    """Root spans started for a request get the trace id that follows from its request id."""

    def generate_trace_id(self) -> int:
        return _next_root.get() or super().generate_trace_id()


@dataclass(frozen=True, slots=True)
class PastSpan:
    """A span known by its times (unix seconds). Clocks that disagree are clamped: it never ends before it starts."""

    name: str
    start_s: float
    end_s: float
    kind: SpanKind = SpanKind.INTERNAL
    attributes: Attributes = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()
    links: tuple[Carrier, ...] = ()
    error: str | None = None  # marks the span as failed


class Tracing:
    """The tracer of one process. Thread safe."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._provider = provider
        self._tracer = trace.NoOpTracer() if provider is None else provider.get_tracer("headrace")

    @classmethod
    def off(cls) -> Tracing:
        return cls(None)

    @classmethod
    def configure(
        cls, service: str, instance: str, settings: TelemetrySettings, *, environ: Mapping[str, str] | None = None
    ) -> Tracing:
        """Tracing to the endpoint of ``settings`` or of OpenTelemetry's own variables; `off` when there is none.

        ``service`` becomes ``service.name`` (``headrace-edge``), ``instance`` ``service.instance.id``.
        """
        variables = os.environ if environ is None else environ
        if settings.otlp_endpoint:
            exporter = OTLPSpanExporter(endpoint=_traces_url(settings.otlp_endpoint))
        elif any(variables.get(name) for name in _ENDPOINT_VARIABLES):
            exporter = OTLPSpanExporter()  # reads them itself
        else:
            return cls.off()
        processor = BatchSpanProcessor(exporter, max_queue_size=8192, schedule_delay_millis=1000)
        return cls.with_processor(service, instance, processor, sample_ratio=settings.trace_sample_ratio)

    @classmethod
    def with_processor(
        cls, service: str, instance: str, processor: SpanProcessor, *, sample_ratio: float = 1.0
    ) -> Tracing:
        """Tracing into any span processor."""
        resource = Resource.create({"service.name": f"headrace-{service}", "service.instance.id": instance})
        provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            id_generator=RequestIdGenerator(),
            resource=resource,
            shutdown_on_exit=False,
        )
        provider.add_span_processor(processor)
        return cls(provider)

    @property
    def enabled(self) -> bool:
        return self._provider is not None

    @contextmanager
    def request(
        self, name: str, request_id: str, client: Carrier, attributes: Attributes | None = None
    ) -> Iterator[Span]:
        """The SERVER span of one HTTP request, current inside. A valid ``traceparent`` in ``client`` (lower-case
        header names) is its parent; otherwise it is a root whose trace id follows from ``request_id``."""
        if self._provider is None and "traceparent" not in client:
            yield trace.INVALID_SPAN
            return
        parent = self.extract(client)
        token = _next_root.set(None if traceparent_trace_id(client) else trace_id_of(request_id))
        try:
            span = self._tracer.start_span(name, parent, SpanKind.SERVER, attributes)
        finally:
            _next_root.reset(token)
        span.set_attribute("request.id", request_id)
        with trace.use_span(span, end_on_exit=True):
            yield span

    def span(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: Carrier | None = None,
        attributes: Attributes | None = None,
    ) -> AbstractContextManager[Span]:
        """A span around a block, current inside. Without ``parent`` it is a child of the current span. An exception
        is recorded, marks the span as failed and passes on."""
        if self._provider is None and parent is None:
            return _NO_SPAN  # what is current, a client's context say, remains so
        return self._span(name, kind, parent, attributes)

    @contextmanager
    def _span(self, name: str, kind: SpanKind, parent: Carrier | None, attributes: Attributes | None) -> Iterator[Span]:
        context = None if parent is None else self.extract(parent)
        with self._tracer.start_as_current_span(name, context, kind, attributes) as span:
            yield span

    def record(self, past: PastSpan, parent: Carrier | None = None) -> dict[str, str]:
        """Write a span that is over. Returns its context, to be the ``parent`` of its children.

        When tracing is off nothing happens and the given parent comes back. Without ``parent`` it is a child of the
        current span.
        """
        if self._provider is None:
            return dict(parent or {})
        span = self._tracer.start_span(
            past.name,
            None if parent is None else self.extract(parent),
            past.kind,
            past.attributes,
            links=self._links(past.links),
            start_time=_nanoseconds(past.start_s),
        )
        for name, at_s, attributes in past.events:
            span.add_event(name, attributes, _nanoseconds(at_s))
        if past.error is not None:
            span.set_status(Status(StatusCode.ERROR, past.error))
        span.end(_nanoseconds(max(past.start_s, past.end_s)))
        return self.inject(span)

    def inject(self, span: Span | None = None) -> dict[str, str]:
        """W3C context of ``span`` (default: the current one) as a plain dict; empty when there is none."""
        carrier: dict[str, str] = {}
        if span is None and trace.get_current_span() is trace.INVALID_SPAN:
            return carrier
        _propagator.inject(carrier, None if span is None else trace.set_span_in_context(span))
        return carrier

    def extract(self, carrier: Carrier) -> Context:
        """The context in ``carrier``: an empty one (so the span becomes a root) when it holds no valid traceparent."""
        return _propagator.extract(carrier, Context())

    def shutdown(self, timeout_s: float = 2.0) -> None:
        """Send what is queued, for at most ``timeout_s``. No spans after this.

        The SDK would wait as long as a dead receiver makes its exporter retry; a thread of its own bears that.
        """
        if self._provider is not None:
            closing = threading.Thread(target=self._provider.shutdown, name="tracing-shutdown", daemon=True)
            closing.start()
            closing.join(timeout_s)

    def _links(self, carriers: Sequence[Carrier]) -> list[Link]:
        spans = (trace.get_current_span(self.extract(carrier)).get_span_context() for carrier in carriers)
        return [Link(span) for span in spans if span.is_valid]


def _traces_url(endpoint: str) -> str:
    base = endpoint.rstrip("/")
    return base if base.endswith("/v1/traces") else f"{base}/v1/traces"


def _nanoseconds(unix_s: float) -> int:
    return int(unix_s * 1_000_000_000)
