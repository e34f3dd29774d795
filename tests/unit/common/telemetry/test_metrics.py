"""Metrics: the pages that Prometheus reads, from one process and from several together."""

from __future__ import annotations

import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http import HTTPStatus

import pytest
from prometheus_client.parser import text_string_to_metric_families

from common.telemetry.federation import federated, merged
from common.telemetry.metrics import EdgeMetrics, WorkerMetrics, exposition
from common.telemetry.metrics_server import MetricsServer
from common.telemetry.settings import MetricsServerSettings

# What dashboards and autoscalers of the field read.
FIELD_NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:request_inference_time_seconds_bucket",
}


def samples(page: bytes) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_the_names_of_the_field_are_there_from_the_start_with_model_and_engine() -> None:
    found = samples(exposition(WorkerMetrics("demo", "3").registry))
    assert set(found) >= FIELD_NAMES
    for name in FIELD_NAMES:
        for labels, _ in found[name]:
            assert (labels["model_name"], labels["engine"]) == ("demo", "3")
    reasons = {labels["finished_reason"] for labels, _ in found["vllm:request_success_total"]}
    assert reasons == {"stop", "length", "abort", "error"}


def test_instruments_with_labels_of_their_own_are_bound_to_the_worker() -> None:
    metrics = WorkerMetrics("demo")
    metrics.step_seconds("forward").observe(0.02)
    metrics.kv_blocks("used").set(7)
    metrics.cancels("api").inc()
    found = samples(exposition(metrics.registry))
    assert found["headrace_worker_kv_blocks"] == [({"model_name": "demo", "engine": "0", "state": "used"}, 7.0)]
    assert found["headrace_worker_step_seconds_count"][0][1] == 1.0


def test_every_instrument_is_named_for_its_unit_and_owned_by_one_side() -> None:
    edge, worker = EdgeMetrics(), WorkerMetrics("demo")
    names = [item.name for item in (*edge.catalogue, *worker.catalogue)]
    assert len(names) == len(set(names))
    for item in (*edge.catalogue, *worker.catalogue):
        assert item.meaning.endswith(".")
        if item.kind == "counter":
            assert item.name.endswith("_total")


def test_pages_of_several_workers_become_one_valid_page() -> None:
    pages = []
    for engine in ("0", "1"):
        metrics = WorkerMetrics("demo", engine)
        metrics.num_requests_running.set(int(engine) + 1)
        pages.append(exposition(metrics.registry))
    page = merged([exposition(EdgeMetrics().registry), *pages])
    assert page.count(b"# TYPE vllm:num_requests_running gauge\n") == 1
    running = samples(page)["vllm:num_requests_running"]
    assert sorted(value for _, value in running) == [1.0, 2.0]
    assert "headrace_edge_requests_in_flight" in samples(page)


class TestServer:
    @pytest.fixture
    def metrics(self) -> WorkerMetrics:
        return WorkerMetrics("demo")

    @pytest.fixture
    def reasons(self) -> list[str]:
        return ["loading weights"]

    @pytest.fixture
    def server(self, metrics: WorkerMetrics, reasons: list[str]) -> Iterator[MetricsServer]:
        settings = MetricsServerSettings(metrics_port=0)
        server = MetricsServer(settings, metrics.registry, lambda: reasons[0] if reasons else None)
        yield server
        server.close()

    def ask(self, server: MetricsServer, path: str, method: str = "GET") -> tuple[int, bytes]:
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}", method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def test_get_and_head_of_the_page(self, server: MetricsServer) -> None:
        status, body = self.ask(server, "/metrics")
        assert (status, b"vllm:num_requests_running" in body) == (HTTPStatus.OK, True)
        assert self.ask(server, "/metrics", "HEAD") == (HTTPStatus.OK, b"")

    def test_readiness_tells_the_reason(self, server: MetricsServer, reasons: list[str]) -> None:
        assert self.ask(server, "/ready") == (HTTPStatus.SERVICE_UNAVAILABLE, b"loading weights")
        reasons.clear()
        assert self.ask(server, "/ready")[0] == HTTPStatus.OK
        assert self.ask(server, "/health")[0] == HTTPStatus.OK
        assert self.ask(server, "/else")[0] == HTTPStatus.NOT_FOUND

    def test_who_hangs_up_leaves_no_traceback(self, server: MetricsServer, capfd: pytest.CaptureFixture[str]) -> None:
        before = threading.enumerate()
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as scraper:
            scraper.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            assert scraper.recv(1 << 16).startswith(b"HTTP/1.1 200")
            serving = [t for t in threading.enumerate() if t not in before and "process_request" in t.name]
            scraper.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
        assert serving, "the connection is kept, and its thread with it"
        for thread in serving:
            thread.join(60)
            assert not thread.is_alive()
        assert capfd.readouterr() == ("", "")

    def test_its_thread_ends_with_it(self, metrics: WorkerMetrics) -> None:
        before = threading.active_count()
        MetricsServer(MetricsServerSettings(metrics_port=0), metrics.registry, lambda: None).close()
        assert threading.active_count() == before

    async def test_an_edge_shows_the_pages_that_answer_and_leaves_out_the_others(self, server: MetricsServer) -> None:
        own = exposition(EdgeMetrics().registry)
        urls = [f"http://127.0.0.1:{server.port}/metrics", "http://127.0.0.1:1/metrics"]
        assert "vllm:num_requests_running" in samples(await federated(own, urls))
        assert await federated(own, []) == own
