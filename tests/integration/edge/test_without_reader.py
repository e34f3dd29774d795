"""What happens to a request that nobody reads any more: cancelled, held for a grace time, or finished, as asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from common.events import CancelReason
from common.transport import RedisSettings
from edge.config import StreamSettings
from tests.integration.edge.letters_model import answer
from tests.integration.edge.running_edge import FAST, ThreadedEdge
from tests.integration.edge.scripted_worker import ScriptedWorker
from tests.integration.edge.wire import CHAT, Connection, body, chunks_of, events_of, get, send, split, text_of, until

CONTINUE = {"X-Headrace-On-Disconnect": "continue"}
CANCEL = {"X-Headrace-On-Disconnect": "cancel"}
KEY = {"Idempotency-Key": "the-key"}
IMPATIENT = StreamSettings(**{**FAST.model_dump(), "resume_grace_s": 0.2})
PATIENT = StreamSettings(**{**FAST.model_dump(), "resume_grace_s": 100.0})


@pytest.fixture
def redis_settings(redis_settings: RedisSettings) -> RedisSettings:
    """A reader is missed soon."""
    return redis_settings.model_copy(update={"reader_timeout_s": 2.0})


async def left_alone(
    edge: ThreadedEdge, worker: ScriptedWorker, headers: dict[str, str], *, stream: bool, max_tokens: int = 100
) -> str:
    """The id of a request whose client hung up while it ran; the worker stands still."""
    connection = await send(edge, CHAT, body(max_tokens=max_tokens, stream=stream), headers)
    await until(lambda: worker.running)
    worker.steps.clear()
    (request_id,) = worker.running
    hang_up(connection)
    await until(lambda: edge.services.occupancy.generations == 0)
    return request_id


def hang_up(connection: Connection) -> None:
    connection[1].transport.abort()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
class TestOnDisconnect:
    @pytest.mark.parametrize("headers", [{}, CANCEL], ids=["by default", "cancel"])
    async def test_cancel_ends_the_request_at_once(
        self, edge: ThreadedEdge, worker: ScriptedWorker, headers: dict[str, str], stream: bool
    ) -> None:
        request_id = await left_alone(edge, worker, headers, stream=stream, max_tokens=2000)
        worker.steps.set()
        await until(lambda: request_id in worker.ended)
        assert worker.ended[request_id] is CancelReason.CLIENT_DISCONNECTED

    @pytest.mark.parametrize("headers", [CONTINUE, CONTINUE | KEY], ids=["plain", "keyed"])
    async def test_continue_brings_the_request_to_its_end(
        self, make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker, headers: dict[str, str], stream: bool
    ) -> None:
        edge = await asyncio.to_thread(make_edge(streams=IMPATIENT).start)
        request_id = await left_alone(edge, worker, headers, stream=stream)
        await asyncio.sleep(2.5)  # longer than any patience
        worker.steps.set()
        await until(lambda: request_id in worker.ended)
        assert worker.ended[request_id] is None
        _, _, raw = split(await get(edge, f"/v1/streams/{request_id}"))
        assert text_of(events_of(chunks_of(raw))) == answer(100)

    @pytest.mark.parametrize("headers", [KEY, CANCEL | KEY], ids=["by default", "cancel"])
    async def test_a_keyed_request_is_held_for_the_grace_time_and_no_longer(
        self, make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker, headers: dict[str, str], stream: bool
    ) -> None:
        edge = await asyncio.to_thread(make_edge(streams=IMPATIENT).start)
        request_id = await left_alone(edge, worker, headers, stream=stream, max_tokens=2000)
        worker.step_s = 0.01
        worker.steps.set()
        await until(lambda: request_id in worker.ended)
        assert worker.ended[request_id] is CancelReason.ORPHANED

    async def test_within_the_grace_time_the_same_post_gets_the_whole_answer(
        self, make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker, stream: bool
    ) -> None:
        edge = await asyncio.to_thread(make_edge(streams=PATIENT).start)
        request_id = await left_alone(edge, worker, KEY, stream=stream)
        again = await send(edge, CHAT, body(max_tokens=100, stream=stream), KEY)
        await until(lambda: edge.services.occupancy.generations == 1)
        worker.steps.set()
        raw = await again[0].read(-1)
        again[1].close()
        _, _, content = split(raw)
        if stream:
            assert text_of(events_of(chunks_of(content))) == answer(100)
        else:
            assert answer(100).encode() in content
        assert worker.ended == {request_id: None}
        assert len(worker.seen) == 1


async def test_another_word_is_refused_by_name(edge: ThreadedEdge) -> None:
    async with httpx.AsyncClient(base_url=edge.url) as client:
        refused = await client.post(CHAT, json=body(), headers={"X-Headrace-On-Disconnect": "maybe"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "X-Headrace-On-Disconnect"


class TestBackground:
    async def test_it_is_accepted_at_once_and_read_later(self, edge: ThreadedEdge, worker: ScriptedWorker) -> None:
        await worker.claim_no_more()
        async with httpx.AsyncClient(base_url=edge.url, timeout=120) as client:
            taken = await client.post(CHAT, json=body(max_tokens=60, background=True))
            assert taken.status_code == 202
            document = taken.json()
            request_id = document["id"]
            assert taken.headers["x-headrace-request-id"] == request_id
            assert (document["status"], document["queue_position"]) == ("queued", 1)
            await until(lambda: edge.services.occupancy.generations == 0)
            await asyncio.sleep(2.5)  # nobody reads: longer than readers are missed
            worker.may_claim = True
            whole = await client.get(f"/v1/streams/{request_id}", params={"stream": "false"})
            assert whole.status_code == 200
            assert whole.json()["choices"][0]["message"]["content"] == answer(60)
            assert whole.json()["usage"]["completion_tokens"] == 60
            status = await client.get(f"/v1/streams/{request_id}/status")
            assert status.json()["status"] == "done"
            _, _, raw = split(await get(edge, f"/v1/streams/{request_id}"))
            assert text_of(events_of(chunks_of(raw))) == answer(60)
            page = (await client.get("/metrics")).text
        assert worker.ended == {request_id: None}
        assert 'outcome="accepted"} 1.0' in page

    async def test_streamed_it_goes_on_when_its_reader_leaves(self, edge: ThreadedEdge, worker: ScriptedWorker) -> None:
        connection = await send(edge, CHAT, body(max_tokens=60, stream=True, background=True), CANCEL)
        await until(lambda: worker.running)
        worker.steps.clear()
        (request_id,) = worker.running
        hang_up(connection)
        await asyncio.sleep(2.5)
        worker.steps.set()
        await until(lambda: request_id in worker.ended)
        assert worker.ended[request_id] is None

    async def test_with_a_key_it_runs_once(self, edge: ThreadedEdge, worker: ScriptedWorker) -> None:
        asked: dict[str, Any] = body(max_tokens=30, background=True)
        async with httpx.AsyncClient(base_url=edge.url) as client:
            answers = [await client.post(CHAT, json=asked, headers=KEY) for _ in range(3)]
            other = await client.post(CHAT, json=body(max_tokens=31, background=True), headers=KEY)
        assert [a.status_code for a in answers] == [202] * 3
        assert len({a.json()["id"] for a in answers}) == 1
        assert other.status_code == 409
        await until(lambda: worker.ended)
        assert len(worker.seen) == 1

    async def test_it_can_be_cancelled(self, edge: ThreadedEdge, worker: ScriptedWorker) -> None:
        async with httpx.AsyncClient(base_url=edge.url) as client:
            request_id = (await client.post(CHAT, json=body(max_tokens=2000, background=True))).json()["id"]
            await until(lambda: worker.running)
            assert (await client.delete(f"/v1/streams/{request_id}")).status_code == 202
            await until(lambda: request_id in worker.ended)
            whole = await client.get(f"/v1/streams/{request_id}", params={"stream": "false"})
        assert worker.ended[request_id] is CancelReason.API
        assert whole.json()["choices"][0]["finish_reason"] == "abort"

    async def test_a_mistake_is_an_error_and_nothing_is_accepted(
        self, edge: ThreadedEdge, worker: ScriptedWorker
    ) -> None:
        async with httpx.AsyncClient(base_url=edge.url) as client:
            refused = await client.post(CHAT, json=body(temperature=9, background=True))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
        assert worker.seen == []
