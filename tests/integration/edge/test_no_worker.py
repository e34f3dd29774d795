"""While a model's last worker is replaced its requests wait; when none comes they end with a typed error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from common.transport import RedisSettings
from edge.config import CatalogSettings, StreamSettings
from tests.integration.edge.letters_model import answer
from tests.integration.edge.running_edge import FAST, ThreadedEdge
from tests.integration.edge.scripted_worker import ScriptedWorker
from tests.integration.edge.wire import (
    CHAT,
    body,
    chunks_of,
    events_of,
    get,
    post,
    read_to,
    rest,
    send,
    split,
    text_of,
    until,
)

NEVER_S, SOON_S = 1000.0, 0.3
QUICK_200 = StreamSettings(**{**FAST.model_dump(), "first_frame_hold_s": 0.05})


def catalog(grace_s: float) -> CatalogSettings:
    return CatalogSettings(catalog_refresh_s=0.05, no_worker_grace_s=grace_s)


async def started(make_edge: Callable[..., ThreadedEdge], grace_s: float, **groups: Any) -> ThreadedEdge:
    return await asyncio.to_thread(make_edge(catalog=catalog(grace_s), **groups).start)


async def alone(edge: ThreadedEdge) -> None:
    """The edge has seen that no worker is left."""
    await until(lambda: edge.services.catalog.absent_s("letters") > 0)


def failed_with(raw: bytes) -> tuple[int, str]:
    status, _, content = split(raw)
    return status, json.loads(content)["error"]["code"]


async def test_a_request_that_comes_between_two_workers_is_served_by_the_second(
    make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker, redis_settings: RedisSettings
) -> None:
    edge = await started(make_edge, NEVER_S)
    await worker.leave()
    await alone(edge)
    assert split(await get(edge, "/ready"))[0] == 200
    assert b'"letters"' in await get(edge, "/v1/models")
    request = asyncio.ensure_future(post(edge, CHAT, body(max_tokens=5)))
    await until(lambda: edge.services.occupancy.generations)
    second = await ScriptedWorker(redis_settings, name="second").start()
    try:
        status, _, content = split(await request)
    finally:
        await second.leave()
    assert status == 200
    assert json.loads(content)["choices"][0]["message"]["content"] == answer(5)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_request_that_was_accepted_before_the_last_worker_went_is_not_left_waiting(
    make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker, stream: bool
) -> None:
    edge = await started(make_edge, SOON_S)
    await worker.claim_no_more()
    waiting = asyncio.ensure_future(post(edge, CHAT, body(stream=stream)))
    await until(lambda: edge.services.occupancy.generations)
    await worker.leave()
    assert failed_with(await waiting) == (503, "model_unavailable")


async def test_a_stream_that_has_begun_to_wait_ends_with_the_error_in_the_stream(
    make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker
) -> None:
    edge = await started(make_edge, SOON_S, streams=QUICK_200)
    await worker.claim_no_more()
    connection = await send(edge, CHAT, body(stream=True), {"X-Headrace-Resumable": "1"})
    head = await read_to(connection, b"\r\n\r\n")
    await worker.leave()
    status, headers, raw = split(head + await rest(connection))
    documents = events_of(chunks_of(raw))
    assert status == 200
    assert documents[-2][1]["error"]["code"] == "model_unavailable"
    assert documents[-1][1] is None, "[DONE]"
    again = await get(edge, f"/v1/streams/{headers['x-headrace-request-id']}?stream=false")
    assert failed_with(again) == (503, "model_unavailable"), "it is the end of the request, wherever it is read"


async def test_when_the_grace_is_over_new_requests_are_refused_at_once(
    make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker
) -> None:
    edge = await started(make_edge, SOON_S)
    await worker.leave()
    await until(lambda: not edge.services.catalog.has_patience("letters"))
    assert failed_with(await post(edge, CHAT, body())) == (503, "model_unavailable")
    assert split(await get(edge, "/ready"))[0] == 503


async def test_an_edge_that_never_saw_a_worker_of_a_model_has_no_patience_with_it(
    make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker
) -> None:
    await worker.leave()
    edge = make_edge(catalog=catalog(NEVER_S))
    await asyncio.to_thread(edge.start, until="/health")
    await until(lambda: edge.services.catalog.models)
    assert failed_with(await post(edge, CHAT, body())) == (503, "model_unavailable")


async def test_what_has_been_begun_waits_on_for_another_worker(
    make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker, redis_settings: RedisSettings
) -> None:
    edge = await started(make_edge, SOON_S)
    worker.pause_at = 10
    connection = await send(edge, CHAT, body(stream=True, max_tokens=20))
    head = await read_to(connection, b'"content":"c"')
    await worker.vanish()
    await until(lambda: not edge.services.catalog.has_patience("letters"))
    assert failed_with(await post(edge, CHAT, body())) == (503, "model_unavailable")
    second = await ScriptedWorker(redis_settings, name="second", takes_over=True, lease_s=4.0).start()
    try:
        raw = split(head + await rest(connection))[2]
    finally:
        await second.leave()
    assert text_of(events_of(chunks_of(raw))) == answer(20)


async def test_but_not_beyond_its_deadline(make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker) -> None:
    edge = await started(make_edge, SOON_S)
    worker.steps.clear()
    request = asyncio.ensure_future(post(edge, CHAT, body(), {"X-Headrace-Deadline-S": "4"}))
    await until(lambda: worker.running)
    await worker.vanish()
    assert failed_with(await request) == (504, "deadline_exceeded")
