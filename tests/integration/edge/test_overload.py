"""What a client may say and ask when there is more work than seats: deadlines, its place, one tenant's share."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from common.transport import RedisSettings
from edge.config import ApiSettings, LimitSettings
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
    read_to,
    rest,
    send,
    split,
    text_of,
    until,
)

ASKING = {"X-Headrace-Queue-Status": "1"}


async def test_a_client_sets_its_own_deadline(edge: ThreadedEdge, worker: ScriptedWorker) -> None:
    await worker.claim_no_more()
    raw = await post(edge, CHAT, body(max_tokens=3), {"X-Headrace-Deadline-S": "0.5"})
    status, headers, document = split(raw)
    assert (status, json.loads(document)["error"]["code"]) == (504, "deadline_exceeded")
    assert headers["x-should-retry"] == "false"
    worker.may_claim = True
    status, headers, _ = split(await post(edge, CHAT, body(max_tokens=3)))
    assert status == 200
    seen = [owned.request.request_id for owned in worker.seen]
    assert seen == [headers["x-request-id"]]  # expired work is never begun


async def test_a_deadline_cannot_be_later_than_the_server_allows(
    make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker
) -> None:
    edge = await asyncio.to_thread(make_edge(limits=LimitSettings(request_timeout_s=1.0)).start)
    await worker.claim_no_more()
    status, _, _ = split(await post(edge, CHAT, body(max_tokens=3), {"X-Headrace-Deadline-S": "500"}))
    assert status == 504


async def test_a_deadline_that_is_none_is_400(edge: ThreadedEdge) -> None:
    for text in ("0", "-1", "soon", "nan", "inf"):
        status, _, raw = split(await post(edge, CHAT, body(max_tokens=3), {"X-Headrace-Deadline-S": text}))
        assert (status, json.loads(raw)["error"]["param"]) == (400, "X-Headrace-Deadline-S"), text


async def test_a_running_stream_past_its_deadline_ends_with_an_error(
    edge: ThreadedEdge, worker: ScriptedWorker
) -> None:
    worker.step_s = 0.02
    raw = await post(edge, CHAT, body(max_tokens=2000, stream=True), {"X-Headrace-Deadline-S": "3"})
    documents = events_of(chunks_of(split(raw)[2]))
    assert text_of(documents[:-2])
    assert documents[-2][1]["error"]["code"] == "deadline_exceeded"
    assert documents[-1][1] is None


class TestPlaceInTheQueue:
    @pytest.fixture
    def redis_settings(self, redis_settings: RedisSettings) -> RedisSettings:
        """One partition: over several the place is an estimate."""
        return redis_settings.model_copy(update={"partitions": 1})

    async def test_a_stream_tells_its_place_until_the_first_token(
        self, make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker
    ) -> None:
        edge = await asyncio.to_thread(make_edge(streams=FAST.model_copy(update={"first_frame_hold_s": 0.1})).start)
        await worker.claim_no_more()
        before = await send(edge, CHAT, body(max_tokens=2, stream=True))
        heads = [await head(before)]  # each is known to wait before the next one comes: that is their order
        bare = await send(edge, CHAT, body(max_tokens=5, stream=True), ASKING)
        heads.append(await head(bare))
        with_ids = await send(edge, CHAT, body(max_tokens=5, stream=True), {**ASKING, "X-Headrace-Resumable": "1"})
        heads.append(await head(with_ids))
        for _ in range(2):
            heads[1] += await read_to(bare, b": queue position=2")
            heads[2] += await read_to(with_ids, b": queue position=3")
        worker.may_claim = True
        for connection, start, position, end in ((bare, heads[1], 2, b"\n\n"), (with_ids, heads[2], 3, b"\n")):
            _, headers, raw = split(start + await rest(connection))
            stream = chunks_of(raw)
            assert headers["x-headrace-queue-position"] == str(position)
            assert stream.count(b": queue position=%d%b" % (position, end)) >= 2
            assert text_of(events_of(stream)) == answer(5)
        assert b": queue" not in chunks_of(split(heads[0] + await rest(before))[2])

    async def test_any_edge_tells_where_a_request_stands(self, edge: ThreadedEdge, worker: ScriptedWorker) -> None:
        await worker.claim_no_more()
        connections = []
        ids = []
        for k in range(3):
            connections.append(await send(edge, CHAT, body(max_tokens=2, stream=True), {"Idempotency-Key": f"k{k}"}))
            ids.append(split(await head(connections[-1]))[1]["x-request-id"])
        async with httpx.AsyncClient(base_url=edge.url) as client:
            documents = [(await client.get(f"/v1/streams/{request_id}/status")).json() for request_id in ids]
            assert [d["status"] for d in documents] == ["queued"] * 3
            assert [d["queue_position"] for d in documents] == [1, 2, 3]
            worker.may_claim = True
            for connection in connections:
                await rest(connection)
            after = (await client.get(f"/v1/streams/{ids[0]}/status")).json()
            assert (after["status"], after["queue_position"], after["cancelled"]) == ("done", None, None)
            unknown = await client.get(f"/v1/streams/0-018f0000-0000-7000-8000-{0:012x}/status")
            assert unknown.status_code == 410


class TestChunkCounts:
    async def test_a_bare_stream_goes_on_after_the_chunks_that_were_read(
        self, edge: ThreadedEdge, worker: ScriptedWorker
    ) -> None:
        _, headers, raw = split(await post(edge, CHAT, body(max_tokens=6, stream=True)))
        whole = [document for _, document in events_of(chunks_of(raw))]
        for read in range(len(whole) + 1):
            path = f"/v1/streams/{headers['x-request-id']}?after_chunks={read}"
            again = events_of(chunks_of(split(await get(edge, path))[2]))
            assert [document for _, document in again] == whole[read:], read

    async def test_it_goes_on_while_the_request_runs(self, edge: ThreadedEdge, worker: ScriptedWorker) -> None:
        worker.step_s = 0.02
        going = {"X-Headrace-On-Disconnect": "continue"}
        connection = await send(edge, CHAT, body(max_tokens=60, stream=True), going)
        start = await head(connection)
        first = start + await connection[0].read(900)
        connection[1].close()
        _, headers, raw = split(first)
        read = [d for _, d in events_of(chunks_of(raw[: raw.rfind(b"\n\n\r\n") + 4]))]
        rest_of_it = split(await get(edge, f"/v1/streams/{headers['x-request-id']}?after_chunks={len(read)}"))[2]
        documents = [("", d) for d in read] + events_of(chunks_of(rest_of_it))
        assert text_of(documents) == answer(60)

    async def test_a_count_that_is_none_is_400(self, edge: ThreadedEdge) -> None:
        _, headers, _ = split(await post(edge, CHAT, body(max_tokens=2, stream=True)))
        status, _, raw = split(await get(edge, f"/v1/streams/{headers['x-request-id']}?after_chunks=-1"))
        assert (status, json.loads(raw)["error"]["param"]) == (400, "after_chunks")


async def test_a_tenants_share_holds_over_all_edges(
    make_edge: Callable[..., ThreadedEdge], worker: ScriptedWorker
) -> None:
    groups = {"api": ApiSettings(api_keys=("one", "two")), "limits": LimitSettings(max_tenant_queued_requests=2)}
    edges = [await asyncio.to_thread(make_edge(**groups).start) for _ in range(2)]
    worker.steps.clear()
    one, two = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
    held = [await send(edge, CHAT, body(max_tokens=3, stream=True), one) for edge in edges]
    await until(lambda: len(worker.running) == 2)
    for edge in edges:
        status, headers, raw = split(await post(edge, CHAT, body(max_tokens=3), one))
        assert (status, json.loads(raw)["error"]["code"]) == (429, "tenant_limit_reached")
        assert 1 <= int(headers["retry-after"]) <= 60
    async with httpx.AsyncClient(base_url=edges[0].url) as client:
        page = (await client.get("/metrics")).text
    assert 'headrace_edge_rejections_total{reason="tenant_requests"} 1.0' in page
    other = await send(edges[0], CHAT, body(max_tokens=3, stream=True), two)
    worker.steps.set()
    for connection in (*held, other):
        assert split(await rest(connection))[0] == 200


async def head(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
    """Status line and headers, with the empty line."""
    async with asyncio.timeout(120):
        return await connection[0].readuntil(b"\r\n\r\n")


class TestBytesOfOneTenant:
    ONE, TWO = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}

    @pytest.fixture
    async def edge(self, make_edge: Callable[..., ThreadedEdge]) -> ThreadedEdge:
        groups = {
            "api": ApiSettings(api_keys=("one", "two")),
            "limits": LimitSettings(max_tenant_bytes=5_000),
        }
        return await asyncio.to_thread(make_edge(**groups).start)

    async def test_bodies_beyond_the_bound_are_refused_until_others_are_over(
        self, edge: ThreadedEdge, worker: ScriptedWorker
    ) -> None:
        await worker.claim_no_more()
        large = body("x" * 3_000, max_tokens=2)
        held = await send(edge, CHAT, large, self.ONE)
        await until(lambda: edge.services.occupancy.generations == 1)
        status, headers, raw = split(await post(edge, CHAT, large, self.ONE))
        assert (status, json.loads(raw)["error"]["code"]) == (429, "tenant_limit_reached")
        assert int(headers["retry-after"]) >= 1
        async with httpx.AsyncClient(base_url=edge.url) as client:
            refused = await client.post("/tokenize", json={"prompt": "x" * 3_000}, headers=self.ONE)
            assert refused.status_code == 429
            assert 'reason="tenant_bytes"} 2.0' in (await client.get("/metrics")).text
        other = await send(edge, CHAT, large, self.TWO)
        await until(lambda: edge.services.occupancy.generations == 2)
        worker.may_claim = True
        for connection in (held, other):
            assert split(await rest(connection))[0] == 200
        assert split(await post(edge, CHAT, large, self.ONE))[0] == 200
        await until(lambda: _held(edge) == [0, 0])

    async def test_stalled_readers_together_hold_no_more_and_lose_nothing(
        self, edge: ThreadedEdge, worker: ScriptedWorker
    ) -> None:
        worker.step_s = 0.0
        stalled = [await stalled_reader(edge, body(max_tokens=800, n=25, stream=True), self.ONE) for _ in range(2)]
        await until(lambda: len(worker.ended) == 2, within_s=120)
        assert 0 < max(_held(edge)) <= 5_000
        assert split(await post(edge, CHAT, body(max_tokens=5), self.TWO))[0] == 200
        for connection in stalled:
            _, _, raw = split(await rest(connection))
            documents = events_of(chunks_of(raw))
            for choice in range(25):
                mine = [d for d in documents if d[1] and d[1]["choices"][0]["index"] == choice]
                assert text_of(mine) == answer(800)
        await until(lambda: max(_held(edge)) == 0)

    async def test_everything_is_given_back_however_a_request_ends(
        self, edge: ThreadedEdge, worker: ScriptedWorker
    ) -> None:
        await post(edge, CHAT, body(temperature=9), self.ONE)
        await post(edge, CHAT, body("FAIL-NOW"), self.ONE)
        connection = await send(edge, CHAT, body(max_tokens=2000, stream=True), self.ONE)
        await read_to(connection, b"data: ")
        connection[1].transport.abort()
        address = urlsplit(edge.url)
        half = await asyncio.open_connection(address.hostname, address.port)
        half[1].write(
            f"POST {CHAT} HTTP/1.1\r\nHost: e\r\nAuthorization: Bearer one\r\nContent-Length: 50\r\n\r\n12345".encode()
        )
        await until(lambda: max(_held(edge)) == 5)
        half[1].transport.abort()
        await until(lambda: max(_held(edge)) == 0)


def _held(edge: ThreadedEdge) -> list[int]:
    return [tally.held for tally in edge.services.occupancy._tallies.values()] or [0]


async def stalled_reader(edge: ThreadedEdge, document: dict[str, Any], headers: dict[str, str]) -> Connection:
    """A connection on which the request was sent and whose answer nobody reads: the kernel holds next to nothing."""
    address = urlsplit(edge.url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (str(address.hostname), address.port or 0))
    connection = await asyncio.open_connection(sock=sock, limit=2048)
    content = json.dumps(document).encode()
    lines = [f"POST {CHAT} HTTP/1.1", "Host: e", "Connection: close", f"Content-Length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    connection[1].write("\r\n".join([*lines, "", ""]).encode() + content)
    return connection
