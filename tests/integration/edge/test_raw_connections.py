"""One connection used in every way that HTTP/1.1 allows, while news are written to it directly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest

from common.events import CancelReason
from edge.follower import Gap
from tests.integration.edge.letters_model import answer
from tests.integration.edge.running_edge import FAST, ThreadedEdge
from tests.integration.edge.scripted_worker import ScriptedWorker
from tests.integration.edge.wire import (
    CHAT,
    Connection,
    body,
    chunks_of,
    events_of,
    get,
    post,
    rest,
    split,
    text_of,
    until,
)

LONG = 2000  # tokens


def request(document: dict[str, Any], **headers: str) -> bytes:
    content = json.dumps(document).encode()
    lines = [f"POST {CHAT} HTTP/1.1", "Host: edge", f"Content-Length: {len(content)}"]
    return (
        "\r\n".join([*lines, *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items()), "", ""]).encode() + content
    )


async def connect(edge: ThreadedEdge, *, receive_buffer: int | None = None) -> Connection:
    address = urlsplit(edge.url)
    sock = socket.socket()
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (str(address.hostname), address.port or 0))
    return await asyncio.open_connection(sock=sock, limit=1 << 16)


async def one_answer(connection: Connection) -> tuple[int, bytes]:
    """Status and content of the next answer; what follows it stays in the connection."""
    reader, _ = connection
    async with asyncio.timeout(120):
        head = await reader.readuntil(b"\r\n\r\n")
        status, headers, _ = split(head)
        if "content-length" in headers:
            return status, await reader.readexactly(int(headers["content-length"]))
        content = b""
        while size := int(await reader.readuntil(b"\r\n"), 16):
            content += await reader.readexactly(size)
            assert await reader.readexactly(2) == b"\r\n"
        assert await reader.readexactly(2) == b"\r\n"
        return status, content


def is_idle(edge: ThreadedEdge) -> bool:
    services = edge.services
    held = [services.occupancy.tally("").held, services.occupancy.generations, services.occupancy.requests]
    return held == [0, 0, 0] and not len(services.relay) and services.metrics.requests_in_flight._value.get() == 0


class TestReuse:
    async def test_answers_of_every_kind_follow_each_other_on_one_connection(
        self, edge: ThreadedEdge, worker: ScriptedWorker
    ) -> None:
        connection = await connect(edge)
        for stream, tokens in [(True, 40), (False, 7), (True, 1), (True, 80), (False, 3)]:
            connection[1].write(request(body(max_tokens=tokens, stream=stream)))
            status, content = await one_answer(connection)
            assert status == 200
            if stream:
                assert text_of(events_of(content)) == answer(tokens)
                assert content.endswith(b"data: [DONE]\n\n")
            else:
                assert json.loads(content)["choices"][0]["message"]["content"] == answer(tokens)
        connection[1].close()
        await until(lambda: is_idle(edge))

    async def test_requests_that_are_sent_ahead_are_answered_in_their_order(
        self, edge: ThreadedEdge, worker: ScriptedWorker
    ) -> None:
        worker.step_s = 0.005
        connection = await connect(edge)
        asked = [50, 3, 30, 1, 20]
        connection[1].write(b"".join(request(body(max_tokens=tokens, stream=True)) for tokens in asked))
        for tokens in asked:
            status, content = await one_answer(connection)
            assert status == 200
            assert text_of(events_of(content)) == answer(tokens)
        connection[1].close()
        await until(lambda: is_idle(edge))

    async def test_a_client_that_leaves_with_requests_sent_ahead_ends_the_one_that_runs(
        self, edge: ThreadedEdge, worker: ScriptedWorker
    ) -> None:
        worker.step_s = 0.02
        connection = await connect(edge)
        connection[1].write(request(body(max_tokens=LONG, stream=True)))
        await connection[0].readuntil(b"\r\n\r\n")
        (request_id,) = worker.running
        connection[1].write(request(body(max_tokens=LONG, stream=True)))
        await connection[0].readuntil(b"c")
        connection[1].transport.abort()
        await until(lambda: request_id in worker.ended)
        assert worker.ended[request_id] is CancelReason.CLIENT_DISCONNECTED
        await until(lambda: is_idle(edge))
        assert len(worker.seen) == 1


@pytest.fixture
def tight_edge(make_edge: Callable[..., ThreadedEdge]) -> Callable[..., ThreadedEdge]:
    """Edges whose kernel takes little for a client, so that a slow one is noticed soon; settings of streams by name."""

    def make(**streams: Any) -> ThreadedEdge:
        edge = make_edge(streams=FAST.model_copy(update=streams))
        edge.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return edge.start()

    return make


class TestStalled:
    """Clients that ask for a lot and take none of it."""

    async def stalled(self, edge: ThreadedEdge, worker: ScriptedWorker) -> Connection:
        worker.step_s = 0.0
        connection = await connect(edge, receive_buffer=2048)
        connection[1].write(request(body(max_tokens=200, n=25, stream=True)))
        connection[1].transport.pause_reading()
        await until(lambda: worker.ended, within_s=120)
        return connection

    async def test_who_takes_nothing_loses_the_connection(
        self, tight_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker
    ) -> None:
        edge = await asyncio.to_thread(tight_edge, send_timeout_s=1.0)
        connection = await self.stalled(edge, worker)
        await until(lambda: is_idle(edge) and not edge.connections, within_s=120)
        connection[1].transport.abort()

    async def test_an_edge_that_stops_does_not_wait_for_them(
        self, tight_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker
    ) -> None:
        edge = await asyncio.to_thread(tight_edge, drain_timeout_s=0.1)
        connection = await self.stalled(edge, worker)
        assert edge.connections
        await asyncio.to_thread(edge.stop)
        connection[1].transport.abort()


class TestWithoutChunks:
    """HTTP/1.0 knows none: the end of the connection is the end of the answer. Proxies still speak it."""

    async def ask(self, edge: ThreadedEdge, content: bytes) -> tuple[dict[str, str], bytes]:
        connection = await connect(edge)
        connection[1].write(content.replace(b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", 1))
        _, got, raw_body = split(await rest(connection))
        return got, raw_body

    async def test_a_stream_is_its_events_and_nothing_else(self, edge: ThreadedEdge, worker: ScriptedWorker) -> None:
        got, content = await self.ask(edge, request(body(max_tokens=40, stream=True)))
        assert "transfer-encoding" not in got
        assert got["connection"] == "close"
        assert text_of(events_of(content)) == answer(40)
        assert content.startswith(b"data: {")
        assert content.endswith(b"data: [DONE]\n\n")

    @pytest.mark.parametrize("fields", [{}, {"temperature": 9}], ids=str)
    async def test_a_document_has_its_length(
        self, edge: ThreadedEdge, worker: ScriptedWorker, fields: dict[str, Any]
    ) -> None:
        got, content = await self.ask(edge, request(body(max_tokens=7, **fields)))
        assert int(got["content-length"]) == len(content)
        assert ("error" if fields else "choices") in json.loads(content)
        await until(lambda: is_idle(edge))


def is_slow(edge: ThreadedEdge) -> bool:
    """Whether a reader is, or was."""
    counted = edge.services.metrics.slow_readers._value.get()
    return bool(counted) or any(follower.gap is Gap.SLOW_READER for follower in edge.services.relay)


class TestPace:
    @pytest.mark.parametrize("with_ids", [False, True])
    async def test_a_client_of_any_pace_reads_the_same_bytes(
        self, tight_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker, with_ids: bool
    ) -> None:
        edge = await asyncio.to_thread(
            tight_edge, reader_buffer_events=8, ping_interval_s=0.02, first_frame_hold_s=0.05
        )
        worker.steps.clear()
        worker.step_s, worker.tokens_a_step = 0.0, 2
        num_pinged = 0
        draw = random.Random(5)
        headers = {"X-Headrace-Resumable": "1"} if with_ids else {"X-Headrace-On-Disconnect": "continue"}
        ping = b": ping\n" if with_ids else b": ping\n\n"

        async def read_unsteadily() -> tuple[str, bytes]:
            connection = await connect(edge, receive_buffer=4096)
            connection[1].write(request(body(max_tokens=600, n=4, stream=True), Connection="close", **headers))
            raw = await connection[0].readuntil(ping)  # before the first token
            nonlocal num_pinged
            num_pinged += 1
            connection[1].transport.pause_reading()
            if num_pinged == 4:
                await asyncio.sleep(0.1)  # as on a busy machine: more than one ping
                worker.steps.set()
            await until(lambda: is_slow(edge), within_s=120)  # the buffer of who does not read is full
            connection[1].transport.resume_reading()
            while part := await connection[0].read(draw.choice([100, 5000, 50000])):
                raw += part
                if draw.random() < 0.02:
                    connection[1].transport.pause_reading()
                    await asyncio.sleep(draw.random() * 0.2)
                    connection[1].transport.resume_reading()
            connection[1].close()
            _, got, raw_body = split(raw)
            assert raw_body.endswith(b"\r\n0\r\n\r\n")
            return got["x-request-id"], chunks_of(raw_body)

        async with asyncio.timeout(200):
            answers = await asyncio.gather(*(read_unsteadily() for _ in range(4)))
        assert edge.services.metrics.slow_readers._value.get()
        for request_id, content in answers:
            assert ping in content
            whole = re.sub(rb"(^|\n\n)(?:" + ping + rb")+", rb"\1", content)
            assert b": ping" not in whole, "a ping within a block"
            _, _, raw = split(await get(edge, f"/v1/streams/{request_id}", headers))
            replay = chunks_of(raw).replace(b": ping\n", b"")
            if not with_ids:
                replay = b"".join(line for line in replay.splitlines(keepends=True) if not line.startswith(b"id: "))
            assert content.replace(ping, b"") == replay
        await until(lambda: is_idle(edge))


async def test_after_a_storm_of_clients_that_leave_nothing_is_counted_any_more(
    edge: ThreadedEdge, worker: ScriptedWorker
) -> None:
    """They leave in a body, before an answer, in its head, and in the middle of direct writes."""
    worker.step_s = 0.001
    draw = random.Random(11)
    bystander = asyncio.create_task(post(edge, CHAT, body(max_tokens=400, stream=True)))

    async def leave_somewhere() -> None:
        connection = await connect(edge)
        sent = request(body("x" * draw.choice([5, 3000]), max_tokens=LONG, stream=draw.random() < 0.8))
        connection[1].write(sent[: draw.choice([len(sent), len(sent), len(sent), len(sent) - 3, 400])])
        wanted = draw.choice([0, 0, 1, 300, 3000, 9000])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while wanted > 0 and (part := await connection[0].read(wanted)):
                    wanted -= len(part)
        await asyncio.sleep(draw.random() * 0.02)
        connection[1].transport.abort()

    for _ in range(6):
        await asyncio.gather(*(leave_somewhere() for _ in range(50)))
    assert text_of(events_of(chunks_of(split(await bystander)[2]))) == answer(400)
    await until(lambda: is_idle(edge), within_s=120)
    await until(lambda: not worker.running, within_s=120)
