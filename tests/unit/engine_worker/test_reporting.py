"""What is left of a request when it has ended: counts and one waterfall of spans."""

from __future__ import annotations

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.events import CancelReason
from common.telemetry.tracing import Tracing
from engine_worker.reporting import Reporting
from tests.unit.engine_worker.text_world import Inside, request


def value(inside: Inside, name: str, **labels: str) -> float:
    found = inside.metrics.registry.get_sample_value(name, {"model_name": "tiny", "engine": "0", **labels})
    return found or 0.0


async def test_each_request_is_counted_once_by_how_it_ended() -> None:
    inside = Inside()
    inside.own(request("0-length", max_tokens=5))
    inside.own(request("0-stop", prompt=(4, 4), max_tokens=200, eos_token_ids=tuple(range(500))))
    inside.own(request("0-abort", prompt=(5, 5), max_tokens=200))
    await inside.write()
    await inside.turn()
    inside.stage.cancel("0-abort", CancelReason.API)
    await inside.run()
    counted = {
        reason: value(inside, "vllm:request_success_total", finished_reason=reason)
        for reason in ("length", "stop", "abort", "error")
    }
    assert counted == {"length": 1, "stop": 1, "abort": 1, "error": 0}
    assert value(inside, "vllm:prompt_tokens_total") == 3 + 2 + 2
    assert value(inside, "vllm:time_to_first_token_seconds_count") == 3
    assert value(inside, "vllm:e2e_request_latency_seconds_count") == 3
    assert value(inside, "headrace_worker_cancels_total", reason="api") == 1
    assert value(inside, "headrace_worker_appended_events_total") == sum(map(len, inside.log.streams.values()))


async def test_engine_counters_grow_by_what_was_added() -> None:
    inside = Inside()
    reporting = inside.stage._reporting
    for _ in range(2):
        inside.own(request(max_tokens=5))
        await inside.run()
        reporting.engine(inside.world.engine.stats(), 0)
        reporting.engine(inside.world.engine.stats(), 0)
    assert value(inside, "vllm:generation_tokens_total") == 10
    assert value(inside, "vllm:num_requests_running") == 0


async def test_spans_hang_under_the_clients_trace_one_a_phase() -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing.with_processor("worker", "w", SimpleSpanProcessor(exporter))
    inside = Inside()
    inside.stage._reporting = Reporting(inside.metrics, tracing, "w")
    inside.own(request(prompt=tuple(range(70)), max_tokens=20))
    await inside.run()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"process request", "queue", "prefill", "decode", "publish"}
    whole = spans["process request"]
    for name in ("queue", "prefill", "decode", "publish"):
        assert spans[name].parent is not None
        assert spans[name].parent.span_id == whole.context.span_id
    assert len(spans["prefill"].events) >= 2, "one event a prompt chunk"
    assert whole.attributes is not None
    assert whole.attributes["gen_ai.usage.output_tokens"] == 20
    tracing.shutdown()


async def test_a_failed_request_marks_its_span() -> None:
    exporter = InMemorySpanExporter()
    inside = Inside(fail=lambda sequence: True)
    inside.stage._reporting = Reporting(
        inside.metrics, Tracing.with_processor("worker", "w", SimpleSpanProcessor(exporter)), "w"
    )
    inside.own(request())
    await inside.run()
    (whole,) = [span for span in exporter.get_finished_spans() if span.name == "process request"]
    assert whole.status.description == "told to fail"
    assert value(inside, "vllm:request_success_total", finished_reason="error") == 1
