"""The log away, full of work, or read by strangers; deadlines that nobody else keeps."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator

import httpx
import pytest

from common.events import CancelReason
from common.transport import RedisSettings
from edge.config import ApiSettings, LimitSettings
from tests.integration.edge.letters_model import answer
from tests.integration.edge.running_edge import FAST, ThreadedEdge
from tests.integration.edge.scripted_worker import ScriptedWorker
from tests.integration.edge.wire import (
    CHAT,
    body,
    chunks_of,
    events_of,
    get,
    is_complete,
    post,
    send,
    split,
    text_of,
    until,
)
from tests.servers import Server, running


def code_of(raw: bytes) -> tuple[int, str]:
    status, _, document = split(raw)
    return status, json.loads(document)["error"]["code"]


def has_shown(edge: ThreadedEdge, streams: int) -> bool:
    """Whether so many are read, and each has something to show."""
    positions = [follower.position for follower in edge.services.relay]
    return len(positions) == streams and min(positions) > 3


class TestLogAway:
    @pytest.fixture
    def own_valkey(self) -> Iterator[Server]:
        with running(Server(fsync="always")) as server:
            yield server

    @pytest.fixture
    def redis_settings(self, own_valkey: Server) -> RedisSettings:
        return RedisSettings(
            redis_url=own_valkey.url, key_prefix=f"{secrets.token_hex(4)}:", partitions=2, redis_retry_s=0.3
        )

    async def test_streams_outlive_a_killed_log(
        self, edge: ThreadedEdge, worker: ScriptedWorker, own_valkey: Server
    ) -> None:
        worker.step_s, worker.pause_at = 0.01, 50
        reading = [asyncio.create_task(post(edge, CHAT, body(max_tokens=100, stream=True))) for _ in range(8)]
        await until(lambda: has_shown(edge, 8))
        worker.pause_at = None
        await asyncio.to_thread(own_valkey.kill)
        await asyncio.sleep(1.5)
        assert not any(task.done() for task in reading)
        await asyncio.to_thread(own_valkey.start)
        for raw in await asyncio.gather(*reading):
            _, _, stream = split(raw)
            assert is_complete(stream)
            assert text_of(events_of(chunks_of(stream))) == answer(100)

    async def test_without_the_log_new_requests_are_503_and_health_stays(
        self, edge: ThreadedEdge, worker: ScriptedWorker, own_valkey: Server
    ) -> None:
        await asyncio.to_thread(own_valkey.kill)
        refused = await post(edge, CHAT, body(max_tokens=2))
        assert code_of(refused) == (503, "log_unavailable")
        assert 1 <= int(split(refused)[1]["retry-after"]) <= 60
        async with httpx.AsyncClient(base_url=edge.url, timeout=120) as client:
            assert (await client.get("/health")).status_code == 200
            assert (await client.get("/metrics")).status_code == 200
            for _ in range(600):  # it has looked at the log before, and looks again
                if (await client.get("/ready")).status_code == 503:
                    break
                await asyncio.sleep(0.1)
            assert (await client.get("/ready")).json()["reason"] == "the log cannot be reached"
        await asyncio.to_thread(own_valkey.start)
        for _ in range(600):
            if split(await post(edge, CHAT, body(max_tokens=2)))[0] == 200:
                return
            await asyncio.sleep(0.1)
        raise AssertionError("the edge did not come back")

    async def test_a_client_that_leaves_during_an_outage_is_not_forgotten(
        self, edge: ThreadedEdge, worker: ScriptedWorker, own_valkey: Server
    ) -> None:
        worker.step_s = 0.01
        connection = await send(edge, CHAT, body(max_tokens=2000, stream=True))
        await until(lambda: worker.running)
        (request_id,) = worker.running
        await asyncio.to_thread(own_valkey.kill)
        connection[1].transport.abort()
        await asyncio.sleep(1.0)
        await asyncio.to_thread(own_valkey.start)
        await until(lambda: request_id in worker.ended)
        assert worker.ended[request_id] is CancelReason.CLIENT_DISCONNECTED

    async def test_an_edge_that_is_stopped_meanwhile_says_so_to_all_its_clients(
        self, make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker, own_valkey: Server
    ) -> None:
        streams = FAST.model_copy(update={"drain_timeout_s": 0.5})
        edge = await asyncio.to_thread(make_edge(streams=streams).start)
        worker.step_s = 0.01
        reading = [asyncio.create_task(post(edge, CHAT, body(max_tokens=2000, stream=s))) for s in (False, True)]
        await until(lambda: has_shown(edge, 2))
        await asyncio.to_thread(own_valkey.kill)
        await until(lambda: all(f.gap for f in edge.services.relay))
        await asyncio.to_thread(edge.stop)
        document, stream = await asyncio.gather(*reading)
        await asyncio.to_thread(own_valkey.start)  # the worker needs it to end
        assert code_of(document) == (503, "draining")
        chunks = chunks_of(split(stream)[2])
        assert is_complete(split(stream)[2])
        assert b'"code":"draining"' in chunks


async def test_a_full_queue_is_429_with_retry_after(
    make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker
) -> None:
    worker.steps.clear()
    edge = await asyncio.to_thread(make_edge(limits=LimitSettings(max_queued_requests=4)).start)
    held = [await send(edge, CHAT, body(max_tokens=5)) for _ in range(4)]
    await until(lambda: len(worker.running) == 4)
    refused = await post(edge, CHAT, body(max_tokens=5))
    assert code_of(refused) == (429, "overloaded")
    assert 1 <= int(split(refused)[1]["retry-after"]) <= 60
    worker.steps.set()
    for _, writer in held:
        writer.close()


class TestTenants:
    ONE, TWO = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}

    @pytest.fixture
    async def edge(self, make_edge: Callable[..., ThreadedEdge]) -> ThreadedEdge:
        groups = {
            "api": ApiSettings(api_keys=("one", "two")),
            "limits": LimitSettings(max_streams_per_tenant=1),
        }
        return await asyncio.to_thread(make_edge(**groups).start)

    async def test_a_stream_is_shown_to_its_own_tenant_only(self, edge: ThreadedEdge) -> None:
        _, headers, _ = split(await post(edge, CHAT, body(max_tokens=3), self.ONE))
        path = f"/v1/streams/{headers['x-request-id']}"
        assert split(await get(edge, path, self.ONE))[0] == 200
        assert code_of(await get(edge, path, self.TWO)) == (410, "stream_expired")
        async with httpx.AsyncClient(base_url=edge.url) as client:
            assert (await client.delete(path, headers=self.TWO)).status_code == 410

    async def test_the_same_idempotency_key_of_two_tenants_is_two_requests(
        self, edge: ThreadedEdge, worker: ScriptedWorker
    ) -> None:
        key = {"Idempotency-Key": "k"}
        ids = [
            split(await post(edge, CHAT, body(max_tokens=3), key | who))[1]["x-request-id"]
            for who in (self.ONE, self.TWO, self.ONE)
        ]
        assert ids[0] == ids[2] != ids[1]
        assert len(worker.seen) == 2

    async def test_one_tenant_at_its_limit_does_not_stop_the_other(
        self, edge: ThreadedEdge, worker: ScriptedWorker
    ) -> None:
        worker.steps.clear()
        _, writer = await send(edge, CHAT, body(max_tokens=3, stream=True), self.ONE)
        await until(lambda: worker.running)
        refused = await post(edge, CHAT, body(max_tokens=3), self.ONE)
        assert code_of(refused) == (429, "tenant_limit_reached")
        assert split(refused)[1]["x-should-retry"] == "false"
        worker.steps.set()
        assert split(await post(edge, CHAT, body(max_tokens=3), self.TWO))[0] == 200
        writer.close()


async def test_a_request_that_no_worker_takes_ends_at_its_deadline(edge: ThreadedEdge, worker: ScriptedWorker) -> None:
    await worker.claim_no_more()
    patience = {"x-stainless-read-timeout": "1.0"}
    assert code_of(await post(edge, CHAT, body(max_tokens=3), patience)) == (504, "deadline_exceeded")


async def test_a_stream_that_no_worker_takes_ends_at_its_deadline_with_an_error(
    make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker
) -> None:
    edge = await asyncio.to_thread(make_edge(limits=LimitSettings(request_timeout_s=2.0)).start)
    await worker.claim_no_more()
    status, _, raw = split(await post(edge, CHAT, body(max_tokens=3, stream=True)))
    assert status == 200
    (_, error), (_, done) = events_of(chunks_of(raw))
    assert (error["error"]["code"], done) == ("deadline_exceeded", None)


async def test_health_answers_while_a_huge_prompt_is_tokenised(edge: ThreadedEdge) -> None:
    async with httpx.AsyncClient(base_url=edge.url, timeout=120) as client:
        big = asyncio.create_task(
            client.post("/v1/completions", json={"prompt": "words and more " * 200_000, "max_tokens": 1})
        )
        answered = 0
        while not big.done():
            assert (await client.get("/health")).status_code == 200
            answered += 1
            await asyncio.sleep(0.01)
        refused = await big
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert answered > 5, "one before and one after it, had it stopped the loop"
