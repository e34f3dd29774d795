"""Readers that leave, come back, stall or lose their frames; edges that drain or are not the first to be asked."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from pydantic import SecretStr

from common.events import CancelReason
from common.transport import FrameBus, LogClient, Reading, RedisSettings
from edge.config import ApiSettings, StreamSettings
from tests.integration.edge.letters_model import answer
from tests.integration.edge.running_edge import FAST, EdgeProcess, ThreadedEdge
from tests.integration.edge.scripted_worker import ScriptedWorker
from tests.integration.edge.wire import (
    CHAT,
    Connection,
    body,
    chunks_of,
    events_of,
    get,
    is_complete,
    post,
    rest,
    send,
    split,
    text_of,
    until,
)
from tests.servers import Server

LONG = 2000  # tokens
RESUMABLE = {"X-Headrace-Resumable": "1"}


async def read_some(connection: Connection, num_bytes: int) -> bytes:
    """At least so many bytes of an answer."""
    got = b""
    async with asyncio.timeout(120):
        while len(got) < num_bytes:
            part = await connection[0].read(4096)
            assert part, got
            got += part
    return got


async def until_queued(worker: ScriptedWorker, count: int) -> None:
    async with asyncio.timeout(60):
        while await worker.num_queued() != count:  # noqa: ASYNC110 - the edge is in another thread
            await asyncio.sleep(0.02)


def leave(connection: Connection) -> None:
    connection[1].transport.abort()


class TestLeaving:
    @pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
    async def test_a_client_that_leaves_ends_its_request(
        self, edge: ThreadedEdge, worker: ScriptedWorker, stream: bool
    ) -> None:
        connection = await send(edge, CHAT, body(max_tokens=LONG, stream=stream))
        await until(lambda: worker.running)
        (request_id,) = worker.running
        leave(connection)
        await until(lambda: request_id in worker.ended)
        assert worker.ended[request_id] is CancelReason.CLIENT_DISCONNECTED

    async def test_a_client_that_leaves_before_a_worker_came_costs_no_work(
        self, edge: ThreadedEdge, worker: ScriptedWorker
    ) -> None:
        await worker.claim_no_more()
        connection = await send(edge, CHAT, body(max_tokens=LONG, stream=True))
        await until_queued(worker, 1)
        leave(connection)
        await until_queued(worker, 0)
        worker.may_claim = True
        _, headers, _ = split(await post(edge, CHAT, body(max_tokens=1)))
        assert [owned.request.request_id for owned in worker.seen] == [headers["x-request-id"]]

    async def test_asked_to_go_on_it_goes_on(self, edge: ThreadedEdge, worker: ScriptedWorker) -> None:
        wish = {"X-Headrace-On-Disconnect": "continue"}
        connection = await send(edge, CHAT, body(max_tokens=100, stream=True), wish)
        await until(lambda: worker.running)
        (request_id,) = worker.running
        leave(connection)
        await until(lambda: request_id in worker.ended)
        assert worker.ended[request_id] is None
        _, _, stream = split(await get(edge, f"/v1/streams/{request_id}"))
        assert text_of(events_of(chunks_of(stream))) == answer(100)

    async def test_cancelled_by_the_api_a_stream_ends_in_order(
        self, edge: ThreadedEdge, worker: ScriptedWorker
    ) -> None:
        connection = await send(edge, CHAT, body(max_tokens=LONG, stream=True))
        await until(lambda: worker.running)
        (request_id,) = worker.running
        async with httpx.AsyncClient(base_url=edge.url) as client:
            assert (await client.delete(f"/v1/streams/{request_id}")).status_code == 202
        _, _, stream = split(await rest(connection))
        documents = events_of(chunks_of(stream))
        assert documents[-2][1]["choices"][0]["finish_reason"] == "abort"
        assert documents[-1][1] is None
        assert worker.ended[request_id] is CancelReason.API


class TestComingBack:
    async def test_a_cut_stream_goes_on_at_any_edge_without_loss_or_repetition(
        self, edge: ThreadedEdge, make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker
    ) -> None:
        edges = [edge, await asyncio.to_thread(make_edge().start)]
        worker.step_s = 0.01
        connection = await send(edges[0], CHAT, body(max_tokens=120, stream=True), RESUMABLE)
        head = await read_some(connection, 4000)
        leave(connection)
        status, headers, raw = split(head)
        assert status == 200
        request_id = headers["x-headrace-request-id"]
        seen = complete_events(raw)
        for edge_number in (1, 0, 1):
            path = f"/v1/streams/{request_id}"
            connection = await send(edges[edge_number], path, headers={"Last-Event-ID": seen[-1][0]}, method="GET")
            more = await (rest(connection) if edge_number == 1 and len(seen) > 60 else read_some(connection, 5000))
            leave(connection)
            seen += complete_events(split(more)[2])
        connection = await send(edges[0], path, headers={"Last-Event-ID": seen[-1][0]}, method="GET")
        seen += complete_events(split(await rest(connection))[2])
        positions = [int(position.partition(".")[0]) for position, _ in seen]
        assert positions == sorted(positions)
        assert len({position for position, _ in seen}) == len(seen)
        assert text_of(seen) == answer(120)
        assert seen[-1][1] is None

    async def test_every_cut_between_two_chunks_resumes_exactly(self, edge: ThreadedEdge) -> None:
        whole = await post(
            edge, CHAT, body(max_tokens=3, stream=True, stream_options={"include_usage": True}), RESUMABLE
        )
        _, headers, raw = split(whole)
        everything = events_of(chunks_of(raw))
        path = f"/v1/streams/{headers['x-headrace-request-id']}"
        for cut, (position, _) in enumerate(everything[:-1], start=1):
            _, _, rest_of_it = split(await get(edge, path, {"Last-Event-ID": position}))
            assert events_of(chunks_of(rest_of_it)) == everything[cut:]

    async def test_after_the_end_there_is_nothing_but_the_end(self, edge: ThreadedEdge) -> None:
        _, headers, raw = split(await post(edge, CHAT, body(max_tokens=3, stream=True), RESUMABLE))
        last = events_of(chunks_of(raw))[-1][0]
        path = f"/v1/streams/{headers['x-headrace-request-id']}"
        status, _, again = split(await get(edge, f"{path}?after={last}"))
        assert (status, chunks_of(again)) == (200, b"")

    @pytest.mark.parametrize(
        ("name", "beyond"), [("after", "{after}"), ("after", "{last}.7"), ("after_chunks", "{chunks}")]
    )
    async def test_a_place_behind_the_end_is_400_that_names_it(
        self, edge: ThreadedEdge, name: str, beyond: str
    ) -> None:
        _, headers, raw = split(await post(edge, CHAT, body(max_tokens=3, stream=True), RESUMABLE))
        documents = events_of(chunks_of(raw))
        last = int(documents[-1][0])
        value = beyond.format(after=last + 1, last=last, chunks=len(documents) + 1)
        status, _, refused = split(await get(edge, f"/v1/streams/{headers['x-headrace-request-id']}?{name}={value}"))
        assert (status, json.loads(refused)["error"]["param"]) == (400, name)

    async def test_a_position_ahead_of_a_running_stream_is_410_that_says_why(
        self, edge: ThreadedEdge, worker: ScriptedWorker
    ) -> None:
        worker.steps.clear()
        first = await send(edge, CHAT, body(max_tokens=3, stream=True), RESUMABLE)
        await until(lambda: worker.running)
        status, _, refused = split(await get(edge, f"/v1/streams/{worker.running[0]}?after=300"))
        error = json.loads(refused)["error"]
        assert (status, error["code"], error["param"]) == (410, "stream_expired", "after")
        assert "position 300 is beyond the log, which ends at " in error["message"]
        assert "failover" in error["message"]
        worker.steps.set()
        await rest(first)

    async def test_a_count_that_the_rest_of_a_running_stream_does_not_reach_is_told_at_its_end(
        self, edge: ThreadedEdge, worker: ScriptedWorker
    ) -> None:
        worker.steps.clear()
        first = await send(edge, CHAT, body(max_tokens=3, stream=True), RESUMABLE)
        await until(lambda: worker.running)
        connection = await send(edge, f"/v1/streams/{worker.running[0]}?after_chunks=1000", method="GET")
        await until(lambda: len(edge.services.relay) == 2)
        worker.steps.set()
        documents = events_of(chunks_of(split(await rest(connection))[2]))
        assert [d and d["error"]["param"] for _, d in documents] == ["after_chunks", None]
        await rest(first)

    async def test_who_may_not_read_a_request_leaves_no_trace_at_it(
        self, make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker, redis_settings: RedisSettings
    ) -> None:
        keys = ApiSettings(api_keys=(SecretStr("one"), SecretStr("two")))
        edge, other = make_edge(api=keys), make_edge(api=keys)
        await asyncio.gather(asyncio.to_thread(edge.start), asyncio.to_thread(other.start))
        worker.steps.clear()
        connection = await send(edge, CHAT, body(max_tokens=5, stream=True), {"Authorization": "Bearer one"})
        await until(lambda: worker.running)
        request_id = worker.running[0]
        log = await LogClient.open(redis_settings)
        before = (await Reading(log).status(request_id)).edges
        for query in ("", "?stream=false", "?after=1"):
            stranger = {"Authorization": "Bearer two"}
            assert split(await get(other, f"/v1/streams/{request_id}{query}", stranger))[0] == 410
        assert (await Reading(log).status(request_id)).edges == before
        assert len(other.services.relay) == 0
        await log.close()
        worker.steps.set()
        await rest(connection)

    @pytest.mark.parametrize("position", ["x", "-1", "1.", "1.x", "9" * 30, "0.1"])
    async def test_a_position_that_is_none_is_400(self, edge: ThreadedEdge, position: str) -> None:
        status, _, _ = split(
            await get(edge, "/v1/streams/0-00000000-0000-7000-8000-000000000000", {"Last-Event-ID": position})
        )
        assert status == 400


class TestGrace:
    @pytest.fixture
    def redis_settings(self, redis_settings: RedisSettings) -> RedisSettings:
        return redis_settings.model_copy(update={"reader_timeout_s": 3.0})

    async def test_without_a_reader_past_its_grace_a_resumable_request_ends(
        self, make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker
    ) -> None:
        edge = await asyncio.to_thread(make_edge(streams=FAST.model_copy(update={"resume_grace_s": 0.5})).start)
        worker.step_s = 0.01
        connection = await send(edge, CHAT, body(max_tokens=LONG, stream=True), RESUMABLE)
        await until(lambda: worker.running)
        (request_id,) = worker.running
        await asyncio.sleep(4.0)  # with a reader it goes on, however long
        assert worker.running == [request_id]
        leave(connection)
        await until(lambda: request_id in worker.ended)
        assert worker.ended[request_id] is CancelReason.ORPHANED


def complete_events(raw: bytes) -> list[tuple[str, Any]]:
    """The events whose blocks came whole, of a body that may be cut anywhere."""
    content = b""
    while raw:
        size, separator, rest_of_it = raw.partition(b"\r\n")
        if not separator or not size:
            break
        content += rest_of_it[: int(size, 16)]
        raw = rest_of_it[int(size, 16) + 2 :]
    whole, _, _ = content.rpartition(b"\n\n")
    return events_of(whole) if whole else []


class TestIdempotency:
    async def test_the_same_key_and_body_is_one_request(
        self, edge: ThreadedEdge, make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker
    ) -> None:
        other = await asyncio.to_thread(make_edge().start)
        key = {"Idempotency-Key": "order-66"}
        answers = await asyncio.gather(
            *(post(where, CHAT, body(max_tokens=50), key) for where in (edge, other, edge, other))
        )
        documents = [json.loads(split(raw)[2]) for raw in answers]
        assert [d["choices"][0]["message"]["content"] for d in documents] == [answer(50)] * 4
        assert len({d["id"] for d in documents}) == 1
        assert len(worker.seen) == 1

    async def test_the_same_key_with_another_body_is_a_conflict(self, edge: ThreadedEdge) -> None:
        key = {"Idempotency-Key": "order-67"}
        assert split(await post(edge, CHAT, body(max_tokens=2), key))[0] == 200
        status, headers, raw = split(await post(edge, CHAT, body(max_tokens=3), key))
        assert (status, headers["x-should-retry"]) == (409, "false")
        assert json.loads(raw)["error"]["code"] == "idempotency_conflict"

    async def test_a_repeated_post_may_go_on_where_it_was(self, edge: ThreadedEdge) -> None:
        key = {"Idempotency-Key": "order-68"}
        asked = body(max_tokens=10, stream=True)
        whole = events_of(chunks_of(split(await post(edge, CHAT, asked, key | RESUMABLE))[2]))
        again = await post(edge, CHAT, asked, key | {"Last-Event-ID": whole[4][0]})
        assert events_of(chunks_of(split(again)[2])) == whole[5:]


class TestLostFrames:
    async def test_a_subscription_that_keeps_breaking_costs_no_token(
        self, edge: ThreadedEdge, worker: ScriptedWorker, valkey: Server
    ) -> None:
        worker.step_s = 0.02
        reading = [asyncio.create_task(post(edge, CHAT, body(max_tokens=60, stream=True))) for _ in range(8)]

        def cut() -> None:
            with valkey.client() as client:
                client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")

        while not all(task.done() for task in reading):
            await asyncio.to_thread(cut)
            await asyncio.sleep(0.15)
        for task in reading:
            _, _, raw = split(task.result())
            assert is_complete(raw)
            assert text_of(events_of(chunks_of(raw))) == answer(60)

    async def test_without_any_frame_the_log_is_read(
        self, make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("edge.app.FrameBus", lambda log, _: FrameBus(log, "where-nobody-publishes"))
        edge = await asyncio.to_thread(make_edge().start)
        _, _, raw = split(await post(edge, CHAT, body(max_tokens=30, stream=True)))
        assert text_of(events_of(chunks_of(raw))) == answer(30)


class TestSlowReaders:
    async def test_a_reader_that_stalls_costs_a_bounded_buffer_and_loses_nothing(
        self, make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker
    ) -> None:
        streams = FAST.model_copy(update={"reader_buffer_events": 16})
        edge = await asyncio.to_thread(make_edge(streams=streams).start)
        worker.step_s = 0.0
        address = urlsplit(edge.url)
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (str(address.hostname), address.port or 0))
        connection = await asyncio.open_connection(sock=sock, limit=2048)
        content = json.dumps(body(max_tokens=800, n=25, stream=True)).encode()
        connection[1].write(
            b"POST %s HTTP/1.1\r\nHost: e\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            % (CHAT.encode(), len(content))
            + content
        )
        await until(lambda: worker.ended, within_s=120)
        (follower,) = edge.services.relay
        assert follower.num_kept <= 16
        assert split(await post(edge, CHAT, body(max_tokens=5)))[0] == 200
        _, _, raw = split(await rest(connection))
        documents = events_of(chunks_of(raw))
        for choice in range(25):
            assert text_of([d for d in documents if d[1] and d[1]["choices"][0]["index"] == choice]) == answer(800)
        assert edge.services.metrics.slow_readers._value.get() >= 1


async def until_draining(client: httpx.AsyncClient) -> httpx.Response:
    """The first answer of a probe that says no."""
    while (probe := await client.get("/ready")).status_code == 200:  # noqa: ASYNC110 - it is another process
        await asyncio.sleep(0.02)
    return probe


async def ask_forever(client: httpx.AsyncClient) -> None:
    while True:
        await client.get("/health")
        await asyncio.sleep(0.1)


class TestDraining:
    @pytest.fixture
    async def process(
        self, request: pytest.FixtureRequest, redis_settings: RedisSettings, worker: ScriptedWorker
    ) -> AsyncIterator[EdgeProcess]:
        streams = {"drain_notice_s": 0.6, "drain_timeout_s": 1.5, "first_frame_hold_s": 0.5}
        edge = EdgeProcess(redis_settings, **(streams | getattr(request, "param", {})))
        try:
            yield await asyncio.to_thread(edge.start)
        finally:
            edge.kill()

    @pytest.mark.parametrize("process", [{"drain_notice_s": 5.0, "drain_timeout_s": 100.0}], indirect=True, ids=[""])
    async def test_running_streams_finish_and_during_the_notice_nothing_is_refused(
        self, process: EdgeProcess, worker: ScriptedWorker
    ) -> None:
        worker.pause_at = 20
        connection = await send(process, CHAT, body(max_tokens=60, stream=True))
        await read_some(connection, 500)
        async with httpx.AsyncClient(base_url=process.url, timeout=120) as client:
            process.terminate()
            assert (await until_draining(client)).json()["reason"] == "draining"
            taken = await client.post(CHAT, json=body(max_tokens=2))
            assert taken.status_code == 200
            with pytest.raises(httpx.TransportError):
                await ask_forever(client)
        worker.pause_at = None
        remaining = await rest(connection)
        assert remaining.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        status, log = await asyncio.to_thread(process.wait)
        assert status == 0, log

    async def test_what_does_not_finish_in_time_ends_with_an_error(
        self, process: EdgeProcess, worker: ScriptedWorker
    ) -> None:
        connection = await send(process, CHAT, body(max_tokens=LONG, stream=True))
        await until(lambda: worker.running)
        worker.steps.clear()
        (request_id,) = worker.running
        process.terminate()
        _, _, raw = split(await rest(connection))
        (_, error), (_, done) = events_of(chunks_of(raw))[-2:]
        assert error["error"]["code"] == "draining"
        assert done is None
        status, log = await asyncio.to_thread(process.wait)
        assert status == 0, log
        worker.steps.set()
        await until(lambda: request_id in worker.ended)
        assert worker.ended[request_id] is CancelReason.ORPHANED

    async def test_a_reader_that_takes_nothing_does_not_hold_the_process(
        self, process: EdgeProcess, worker: ScriptedWorker
    ) -> None:
        worker.step_s = 0.0
        connection = await send(process, CHAT, body(max_tokens=LONG, stream=True))
        await until(lambda: worker.ended, within_s=120)
        process.terminate()
        status, log = await asyncio.to_thread(process.wait)
        assert status == 0, log
        leave(connection)

    @pytest.mark.parametrize("process", [{"drain_notice_s": 300.0}], indirect=True, ids=[""])
    async def test_a_second_signal_ends_it_at_once(self, process: EdgeProcess, worker: ScriptedWorker) -> None:
        connection = await send(process, CHAT, body(max_tokens=LONG, stream=True))
        await until(lambda: worker.running)
        worker.steps.clear()
        async with httpx.AsyncClient(base_url=process.url, timeout=120) as client:
            process.terminate()
            await until_draining(client)
        process.process.send_signal(signal.SIGTERM)
        status, log = await asyncio.to_thread(process.wait)
        assert status == 0, log
        leave(connection)
        worker.steps.set()


async def test_an_edge_that_is_killed_leaves_streams_that_others_finish(
    redis_settings: RedisSettings, edge: ThreadedEdge, worker: ScriptedWorker
) -> None:
    worker.step_s = 0.01
    victim = EdgeProcess(redis_settings)
    await asyncio.to_thread(victim.start)
    connection = await send(victim, CHAT, body(max_tokens=100, stream=True), RESUMABLE)
    _, headers, raw = split(await read_some(connection, 3000))
    victim.kill()
    leave(connection)
    seen = complete_events(raw)
    path = f"/v1/streams/{headers['x-headrace-request-id']}"
    seen += events_of(chunks_of(split(await get(edge, path, {"Last-Event-ID": seen[-1][0]}))[2]))
    assert text_of(seen) == answer(100)


async def test_a_stream_that_cannot_end_well_is_cut(
    make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge = await asyncio.to_thread(make_edge(streams=StreamSettings(ping_interval_s=0)).start)
    worker.step_s = 0.01
    connection = await send(edge, CHAT, body(max_tokens=LONG, stream=True))
    await read_some(connection, 500)
    (request_id,) = worker.running

    def broken(*_: object) -> list[bytes]:
        raise ZeroDivisionError

    monkeypatch.setattr("edge.generation.StreamRenderer.feed", broken)
    raw = await rest(connection)
    assert not raw.endswith(b"0\r\n\r\n")
    assert b"[DONE]" not in raw
    monkeypatch.undo()
    await until(lambda: request_id in worker.ended)
