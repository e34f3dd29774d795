"""What stands around the generations: models, probes, errors, keys, ids, limits."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.telemetry.tracing import Tracing
from common.transport import RedisSettings
from edge.config import ApiSettings, CatalogSettings, HttpSettings, LimitSettings
from tests.integration.edge import letters_model
from tests.integration.edge.running_edge import ThreadedEdge
from tests.integration.edge.scripted_worker import ScriptedWorker
from tests.integration.edge.wire import until

CHAT = "/v1/chat/completions"
HELLO = {"model": letters_model.NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
REQUEST_ID = re.compile(r"\d+-[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}")


async def call(edge: ThreadedEdge, method: str, path: str, **kwargs: Any) -> httpx.Response:
    async with httpx.AsyncClient(base_url=edge.url, timeout=120) as client:
        return await client.request(method, path, **kwargs)


async def eventually(edge: ThreadedEdge, path: str, status: int) -> None:
    for _ in range(1200):
        if (await call(edge, "GET", path)).status_code == status:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{path} never answered {status}")


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The error object, after checking that it is one and that the answer can be matched with the logs."""
    assert answer.headers["content-type"].startswith("application/json")
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"] in error["message"]
    return error


async def test_models_are_listed_under_every_name(edge: ThreadedEdge) -> None:
    answer = await call(edge, "GET", "/v1/models")
    assert [item["id"] for item in answer.json()["data"]] == [letters_model.NAME, letters_model.ALIAS]
    assert answer.json()["data"][0]["max_model_len"] == letters_model.MAX_MODEL_LEN


async def test_a_model_id_may_hold_a_slash(edge: ThreadedEdge) -> None:
    answer = await call(edge, "GET", f"/v1/models/{letters_model.ALIAS}")
    assert (answer.status_code, answer.json()["id"]) == (200, letters_model.ALIAS)


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{letters_model.ALIAS}", "/v1/models/nobody"])
async def test_models_answer_head_as_they_answer_get(edge: ThreadedEdge, path: str) -> None:
    answer, head = await call(edge, "GET", path), await call(edge, "HEAD", path)
    assert (head.status_code, head.content) == (answer.status_code, b"")


async def test_a_model_without_an_id_is_404(edge: ThreadedEdge) -> None:
    answer = await call(edge, "GET", "/v1/models/")
    assert (answer.status_code, error_of(answer)["code"]) == (404, "path_not_found")


async def test_an_unknown_model_is_404_and_names_those_there_are(edge: ThreadedEdge) -> None:
    for answer in (
        await call(edge, "GET", "/v1/models/nobody/knows"),
        await call(edge, "POST", CHAT, json=HELLO | {"model": "nobody/knows"}),
    ):
        assert answer.status_code == 404
        error = error_of(answer)
        assert (error["type"], error["param"], error["code"]) == ("NotFoundError", "model", "model_not_found")
        assert letters_model.NAME in error["message"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version", "/load", "/docs", "/openapi.json"])
async def test_probes_answer(edge: ThreadedEdge, path: str) -> None:
    answer = await call(edge, "GET", path)
    assert answer.status_code == 200
    assert answer.headers["x-request-id"]


async def test_metrics_answer_head_and_get(edge: ThreadedEdge) -> None:
    assert (await call(edge, "HEAD", "/metrics")).status_code == 200
    page = (await call(edge, "GET", "/metrics")).text
    assert 'headrace_live_workers{model="letters"} 1.0' in page


async def test_made_up_names_and_paths_never_become_labels(edge: ThreadedEdge) -> None:
    await call(edge, "POST", CHAT, json=HELLO | {"model": "zq17"})
    await call(edge, "GET", "/v1/zq17")
    await call(edge, "GET", "/zq17/x")
    page = (await call(edge, "GET", "/metrics")).text
    assert "zq17" not in page
    assert 'http_requests_total{handler="unmatched",method="GET",status="4xx"} 2.0' in page


@pytest.mark.parametrize(
    ("method", "path", "status", "mentions"),
    [
        ("POST", "/chat/completions", 404, "/v1/chat/completions"),
        ("POST", "/v1/v1/chat/completions", 404, "/v1/chat/completions"),
        ("GET", "/nowhere", 404, "/v1/"),
        ("GET", CHAT, 405, "POST"),
        ("DELETE", "/v1/models", 405, "GET"),
        ("GET", "/v1/streams/not-an-id", 400, "request id"),
        ("GET", "/v1/streams/0-00000000-0000-7000-8000-000000000000", 410, ""),
    ],
)
async def test_what_is_not_there_says_so_in_openai_form(
    edge: ThreadedEdge, method: str, path: str, status: int, mentions: str
) -> None:
    answer = await call(edge, method, path)
    assert answer.status_code == status
    assert mentions in error_of(answer)["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"text"', b'{"model": NaN}', b"\xff\xfe", b"[" * 100_000, b'{"messages": "x"}', b"{}"],
    ids=["empty", "cut", "list", "text", "nan", "not utf-8", "deep", "messages text", "nothing"],
)
async def test_a_bad_body_is_400(edge: ThreadedEdge, body: bytes) -> None:
    answer = await call(edge, "POST", CHAT, content=body)
    assert answer.status_code == 400
    assert error_of(answer)["type"] == "BadRequestError"


async def test_a_body_over_the_limit_is_413(make_edge: Callable[..., ThreadedEdge]) -> None:
    edge = await asyncio.to_thread(make_edge(limits=LimitSettings(max_body_bytes=2048)).start)
    large = json.dumps(HELLO | {"user": "x" * 4096}).encode()

    async def in_chunks() -> Any:
        for at in range(0, len(large), 512):
            yield large[at : at + 512]

    for content in (large, in_chunks()):
        answer = await call(edge, "POST", CHAT, content=content)
        assert (answer.status_code, error_of(answer)["code"]) == (413, "request_too_large")


async def test_a_clients_request_id_is_echoed_and_ours_is_told_too(edge: ThreadedEdge) -> None:
    answer = await call(edge, "GET", "/v1/models", headers={"X-Request-Id": "my-id-77"})
    assert answer.headers["x-request-id"] == "my-id-77"
    assert REQUEST_ID.fullmatch(answer.headers["x-headrace-request-id"])


@pytest.mark.parametrize("label", ["", "x" * 129, "a b", "a\tb", "é"])
async def test_an_unfit_request_id_is_replaced(edge: ThreadedEdge, label: str) -> None:
    answer = await call(edge, "GET", "/v1/models", headers={"X-Request-Id": label.encode()})
    assert REQUEST_ID.fullmatch(answer.headers["x-request-id"])


class TestKeys:
    @pytest.fixture
    async def edge(self, make_edge: Callable[..., ThreadedEdge]) -> ThreadedEdge:
        return await asyncio.to_thread(make_edge(api=ApiSettings(api_keys=("right", "also"))).start)

    @pytest.mark.parametrize("path", ["/v1/models", "/v1/nowhere", "/load", "/nowhere"])
    @pytest.mark.parametrize("given", [None, "Bearer wrong", "right", "Basic right", "Bearer", "Bearer right wrong"])
    async def test_without_a_right_key_nothing_is_told(self, edge: ThreadedEdge, path: str, given: str | None) -> None:
        answer = await call(edge, "GET", path, headers={"Authorization": given} if given else {})
        assert answer.status_code == 401
        assert (error_of(answer)["code"], answer.headers["www-authenticate"]) == ("invalid_api_key", "Bearer")

    @pytest.mark.parametrize("given", ["Bearer right", "bearer also"])
    async def test_each_right_key_opens(self, edge: ThreadedEdge, given: str) -> None:
        assert (await call(edge, "GET", "/v1/models", headers={"Authorization": given})).status_code == 200

    @pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version"])
    async def test_probes_need_none(self, edge: ThreadedEdge, path: str) -> None:
        assert (await call(edge, "GET", path)).status_code == 200


async def test_a_browser_may_ask_and_read_the_ids(make_edge: Callable[..., ThreadedEdge]) -> None:
    edge = await asyncio.to_thread(make_edge(api=ApiSettings(cors_origins=("https://app.example",))).start)
    asks = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-request-id, last-event-id",
    }
    preflight = await call(edge, "OPTIONS", CHAT, headers=asks)
    assert preflight.status_code == 200
    assert preflight.headers["x-request-id"]
    refused = await call(edge, "POST", CHAT, content=b"{", headers={"Origin": "https://app.example"})
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    assert "x-request-id" in refused.headers["access-control-expose-headers"]


async def test_a_model_without_a_worker_is_503_with_retry_after(
    make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker, redis_settings: RedisSettings
) -> None:
    catalog = CatalogSettings(catalog_refresh_s=0.1, no_worker_grace_s=0)
    edge = await asyncio.to_thread(make_edge(catalog=catalog).start)
    await worker.leave()
    await eventually(edge, "/ready", 503)
    assert (await call(edge, "GET", "/ready")).json()["reason"] == "no model has a live worker"
    answer = await call(edge, "POST", CHAT, json=HELLO)
    assert (answer.status_code, error_of(answer)["code"]) == (503, "model_unavailable")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert (await call(edge, "GET", "/health")).status_code == 200


async def test_a_proxys_path_prefix_is_taken_with_and_without(make_edge: Callable[..., ThreadedEdge]) -> None:
    edge = make_edge(http=HttpSettings(host="127.0.0.1", port=0, root_path="/llm"))
    await asyncio.to_thread(edge.start)
    for path in ("/v1/models", "/llm/v1/models"):
        assert (await call(edge, "GET", path)).status_code == 200


async def test_at_the_limit_of_open_requests_probes_still_answer(
    make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker
) -> None:
    worker.steps.clear()
    edge = await asyncio.to_thread(make_edge(limits=LimitSettings(max_connections=1)).start)
    held = asyncio.create_task(call(edge, "POST", CHAT, json=HELLO))
    await until(lambda: worker.seen)
    assert (await call(edge, "GET", "/v1/models")).status_code == 429
    assert (await call(edge, "GET", "/health")).status_code == 200
    worker.steps.set()
    assert (await held).status_code == 200


async def test_a_trace_is_told_of_when_there_is_one(make_edge: Callable[..., ThreadedEdge]) -> None:
    exporter = InMemorySpanExporter()
    tracing = Tracing.with_processor("edge", "test", SimpleSpanProcessor(exporter))
    edge = await asyncio.to_thread(make_edge(tracing=tracing).start)
    answer = await call(edge, "POST", CHAT, json=HELLO | {"stream": True})
    trace_id = answer.headers["traceresponse"].split("-")[1]
    assert trace_id == answer.headers["x-request-id"].partition("-")[2].replace("-", "")
    await until(lambda: len(exporter.get_finished_spans()) == 5)  # the last one ends after the answer was read
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {f"POST {CHAT}", "validate", "render", "submit", "relay"}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {trace_id}
    assert (spans[f"POST {CHAT}"].attributes or {})["headrace.outcome"] == "ok"
