"""Spans across processes, sent to a real OTLP receiver or kept in memory."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

from common.events import EngineRequest, SamplingParams, Usage
from common.telemetry.genai import request_attributes, response_attributes
from common.telemetry.settings import TelemetrySettings
from common.telemetry.tracing import PastSpan, Tracing
from tests.servers import free_port

REQUEST_ID = "req_0192f0c1a2b37c4d8e5f60718293a4b5"
TRACE_ID = 0x0192F0C1A2B37C4D8E5F60718293A4B5
CLIENT = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "a=b"}


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(memory: InMemorySpanExporter) -> Iterator[Tracing]:
    tracing = Tracing.with_processor("test", "1", SimpleSpanProcessor(memory))
    yield tracing
    tracing.shutdown()


def by_name(memory: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in memory.get_finished_spans()}


class TestRequest:
    def test_a_root_span_has_the_trace_id_of_its_request_id(
        self, tracing: Tracing, memory: InMemorySpanExporter
    ) -> None:
        with tracing.request("POST /x", REQUEST_ID, {}, {"a": 1}), tracing.span("inner"):
            pass
        spans = by_name(memory)
        root = spans["POST /x"]
        assert root.context.trace_id == TRACE_ID
        assert root.parent is None
        assert root.kind is SpanKind.SERVER
        assert dict(root.attributes or {}) == {"a": 1, "request.id": REQUEST_ID}
        inner = spans["inner"]
        assert inner.parent is not None
        assert (inner.context.trace_id, inner.parent.span_id) == (TRACE_ID, root.context.span_id)

    def test_the_client_s_trace_is_continued(self, tracing: Tracing, memory: InMemorySpanExporter) -> None:
        with tracing.request("POST /x", REQUEST_ID, CLIENT):
            carrier = tracing.inject()
        (span,) = memory.get_finished_spans()
        assert span.parent is not None
        assert f"{span.context.trace_id:032x}-{span.parent.span_id:016x}" in CLIENT["traceparent"]
        assert carrier["tracestate"] == "a=b"

    def test_two_requests_do_not_share_a_trace(self, tracing: Tracing, memory: InMemorySpanExporter) -> None:
        for request_id in ("a", "b"):
            with tracing.request("POST /x", request_id, {}):
                pass
        first, second = memory.get_finished_spans()
        assert first.context.trace_id != second.context.trace_id

    def test_an_exception_marks_the_span_and_passes_on(self, tracing: Tracing, memory: InMemorySpanExporter) -> None:
        with pytest.raises(ValueError, match="wrong"), tracing.request("POST /x", REQUEST_ID, {}):
            raise ValueError("wrong")
        (span,) = memory.get_finished_spans()
        assert span.status.status_code is StatusCode.ERROR


class TestPastSpans:
    def test_a_worker_hangs_its_spans_below_the_edge_s(self, tracing: Tracing, memory: InMemorySpanExporter) -> None:
        with tracing.request("POST /x", REQUEST_ID, {}):
            carrier = tracing.inject()
        process = tracing.record(PastSpan("process", 10.0, 12.5, kind=SpanKind.CONSUMER), carrier)
        tracing.record(PastSpan("prefill", 10.5, 11.0, events=(("first_token", 11.0, {"n": 1}),)), process)
        spans = by_name(memory)
        assert {span.context.trace_id for span in spans.values()} == {TRACE_ID}
        assert spans["process"].parent is not None
        assert spans["process"].parent.span_id == spans["POST /x"].context.span_id
        assert spans["prefill"].parent is not None
        assert spans["prefill"].parent.span_id == spans["process"].context.span_id
        assert (spans["process"].start_time, spans["process"].end_time) == (10_000_000_000, 12_500_000_000)
        assert [(event.name, event.timestamp) for event in spans["prefill"].events] == [("first_token", 11_000_000_000)]

    def test_clocks_that_disagree_make_no_negative_span(self, tracing: Tracing, memory: InMemorySpanExporter) -> None:
        tracing.record(PastSpan("queue", 10.0, 9.0), {})
        (span,) = memory.get_finished_spans()
        assert span.start_time == span.end_time == 10_000_000_000

    def test_a_second_attempt_links_to_the_first_and_may_fail(
        self, tracing: Tracing, memory: InMemorySpanExporter
    ) -> None:
        first = tracing.record(PastSpan("first", 1.0, 2.0), {})
        tracing.record(PastSpan("second", 3.0, 4.0, links=(first, {}), error="lost"), {})
        spans = by_name(memory)
        assert [link.context.span_id for link in spans["second"].links] == [spans["first"].context.span_id]
        assert spans["second"].status.description == "lost"


class TestOff:
    def test_nothing_is_recorded_and_the_client_s_context_still_travels(self) -> None:
        tracing = Tracing.configure("edge", "1", TelemetrySettings(), environ={})
        assert not tracing.enabled
        with tracing.request("POST /x", REQUEST_ID, CLIENT) as span:
            assert not span.is_recording()
            assert tracing.inject()["traceparent"] == CLIENT["traceparent"]
        assert tracing.record(PastSpan("x", 1.0, 2.0), CLIENT) == CLIENT
        with tracing.request("POST /x", REQUEST_ID, {}):
            assert tracing.inject() == {}
        tracing.shutdown()

    def test_it_costs_microseconds(self) -> None:
        tracing = Tracing.off()
        start = time.thread_time()
        for _ in range(1000):
            tracing.record(PastSpan("x", 1.0, 2.0), {})
        assert time.thread_time() - start < 0.5


class TestExport:
    async def test_spans_arrive_at_a_real_receiver_with_their_service(self) -> None:
        port = free_port()
        async with OtelTapHttpProtobufReceiver(OtelTapHttpProtobufReceiverSettings(http_port=port)) as receiver:
            settings = TelemetrySettings(otlp_endpoint=f"http://127.0.0.1:{port}")
            tracing = Tracing.configure("edge", "edge-1", settings, environ={})
            with tracing.request("POST /x", REQUEST_ID, {}):
                pass
            tracing.shutdown()
            span = await receiver.await_trace(lambda item: item.name == "POST /x", timeout=120)
        assert span.trace_id in (TRACE_ID.to_bytes(16), f"{TRACE_ID:032x}")

    def test_opentelemetry_s_own_variable_turns_it_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
        tracing = Tracing.configure("edge", "1", TelemetrySettings())
        assert tracing.enabled
        tracing.shutdown(timeout_s=0.1)

    def test_a_dead_receiver_delays_neither_requests_nor_the_end(self) -> None:
        settings = TelemetrySettings(otlp_endpoint=f"http://127.0.0.1:{free_port()}")
        tracing = Tracing.configure("edge", "1", settings, environ={})
        start = time.monotonic()
        for i in range(200):
            with tracing.request("POST /x", f"r{i}", {}):
                pass
        assert time.monotonic() - start < 60, "a tenth of a second a request, had they waited for a second try each"
        start = time.monotonic()
        tracing.shutdown(timeout_s=0.2)
        assert time.monotonic() - start < 9, "the exporter itself would try for ten seconds"


def test_gen_ai_attributes_say_what_was_asked_and_what_came() -> None:
    sampling = SamplingParams(max_tokens=5, seed=1 << 63, temperature=0.5, top_k=4, stop=("x",))
    request = EngineRequest(request_id="r", model="demo", prompts=((1, 2),), sampling=sampling, n=2, tenant="t")
    attributes = request_attributes(request, "chat", is_stream=True)
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.seed"] == str(1 << 63)
    assert attributes["gen_ai.request.choice.count"] == 2
    assert attributes["gen_ai.request.stop_sequences"] == ("x",)
    assert "gen_ai.request.presence_penalty" not in attributes
    usage = Usage(prompt_tokens=2, completion_tokens=3, cached_tokens=1)
    assert response_attributes("demo", ["stop"], usage) == {
        "gen_ai.response.model": "demo",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.input_tokens": 2,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 1,
    }
