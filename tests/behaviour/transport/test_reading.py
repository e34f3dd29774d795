"""Reading from any position, and catching up when pushes are lost."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.errors import InvalidRequest, StreamExpired, StreamGap, UnknownEvent
from common.events import Recorded, decode_output
from common.transport import Frame, FrameBus, RequestPhase, Resubscribed
from tests.behaviour.transport.world import World, ended, started, tokens


async def test_attach_reads_from_any_position(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new(grace_s=2.5)
    events = [started(1), *(tokens(1, k) for k in range(9))]
    await worker.append(await worker.claim_one(), 1, *events)
    for after in (0, 1, 7, 10):
        attached = await world.reading.attach(request.request_id, after=after, edge_id="edge-x")
        assert [item.event for item in attached.events] == events[after:]
        assert [item.n for item in attached.events] == list(range(after + 1, 11))
        assert (attached.last_n, attached.phase, attached.grace_s) == (10, RequestPhase.RUNNING, 2.5)
    some = await world.reading.attach(request.request_id, after=2, edge_id="edge-x", limit=3)
    assert ([item.n for item in some.events], some.last_n) == ([3, 4, 5], 10)
    assert [item.n for item in await world.reading.read_range(request.request_id, after=5, limit=2)] == [6, 7]
    beyond = await world.reading.attach(request.request_id, after=99, edge_id="")
    assert (beyond.events, beyond.last_n) == ((), 10)  # what a reader sees after a lost tail


async def test_attach_says_that_somebody_reads(world: World) -> None:
    request = await world.submit_new(edge="edge-a")
    key = world.client.keys.request(request.request_id)
    await world.raw("HSET", key, "seen", 0, key=key)
    await world.reading.attach(request.request_id, after=0, edge_id="")
    assert (await world.reading.status(request.request_id)).seen_s == 0
    before = time.time()
    await world.reading.attach(request.request_id, after=0, edge_id="edge-b")
    status = await world.reading.status(request.request_id)
    assert status.edges == ("edge-b", "edge-a")
    assert before - 1 < status.seen_s < time.time() + 1
    for k in range(20):
        await world.reading.attach(request.request_id, after=0, edge_id=f"edge-{k}")
    assert len((await world.reading.status(request.request_id)).edges) == 8
    await world.reading.detach(request.request_id, "edge-19")
    assert (await world.reading.status(request.request_id)).edges[0] == "edge-18"


async def test_many_requests_are_asked_at_once_how_far_they_are(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.transport.reading._BATCH", 2)
    worker = await world.worker("w1")
    expected: dict[str, int | None] = {world.request().request_id: None}
    for length in range(1, 6):
        request = await world.submit_new()
        await worker.append(await worker.claim_one(), 1, started(1), *(tokens(1, k) for k in range(length - 1)))
        expected[request.request_id] = length
    waiting = await world.submit_new()
    expected[waiting.request_id] = 0
    assert await world.reading.lengths(expected) == expected


async def test_an_unknown_request_has_expired(world: World) -> None:
    request_id = world.request().request_id
    with pytest.raises(StreamExpired):
        await world.reading.attach(request_id, after=0, edge_id="edge-a")
    with pytest.raises(StreamExpired):
        await world.reading.status(request_id)
    assert await world.reading.read_range(request_id, after=0) == []
    await world.reading.detach(request_id, "edge-a")
    await world.reading.keep_alive([request_id])
    key = world.client.keys.request(request_id)
    assert not await world.raw("EXISTS", key, key=key)
    with pytest.raises(InvalidRequest):
        await world.reading.attach("nonsense", after=0, edge_id="edge-a")


async def test_a_broken_log_is_refused_loudly(world: World) -> None:
    request = await world.submit_new()
    key = world.client.keys.output(request.request_id)
    await world.raw("XADD", key, "2-0", "d", b"x", key=key)
    with pytest.raises(StreamGap):
        await world.reading.attach(request.request_id, after=0, edge_id="")
    with pytest.raises(UnknownEvent):
        await world.reading.attach(request.request_id, after=1, edge_id="")


async def test_an_event_is_read_or_pushed_whenever_one_attaches(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new(edge="")
    owned = await worker.claim_one()

    async def produce() -> None:
        await worker.append(owned, 1, started(1))
        for n in range(2, 40):
            await worker.append(owned, n, tokens(1, n))
        await worker.append(owned, 40, ended(1), is_final=True)

    async with FrameBus(world.client, "edge-a") as bus:
        signals = aiter(bus)
        assert await anext(signals) == Resubscribed()
        producing = asyncio.create_task(produce())
        await asyncio.sleep(0.01)
        attached = await world.reading.attach(request.request_id, after=0, edge_id="edge-a")
        seen = list(attached.events)
        while len(seen) < 40:
            frames = await anext(signals)
            assert isinstance(frames, tuple)
            for frame in frames:
                if frame.n == len(seen) + 1:
                    seen.append(Recorded(frame.n, decode_output(frame.payload)))
                assert frame.n <= len(seen)  # never a gap
        await producing
    assert seen == await world.log(request.request_id)


async def test_frames_lost_with_their_connection_are_found_in_the_log(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new(edge="edge-a")
    owned = await worker.claim_one()
    await worker.append(owned, 1, started(1))
    async with FrameBus(world.client, "edge-a") as bus:
        signals = aiter(bus)
        assert await anext(signals) == Resubscribed()
        await world.client.connections.on_primaries("CLIENT", "KILL", "TYPE", "pubsub")
        await worker.append(owned, 2, tokens(1, 5))  # to nobody
        async with asyncio.timeout(60):
            while not isinstance(await anext(signals), Resubscribed):
                pass
        attached = await world.reading.attach(request.request_id, after=1, edge_id="edge-a")
        assert [item.event for item in attached.events] == [tokens(1, 5)]
        await worker.append(owned, 3, tokens(1, 6))
        pushed: list[int] = []
        async with asyncio.timeout(60):
            while 3 not in pushed:  # the second is pushed too where the subscription was back already
                pushed += frame_numbers(await anext(signals))


async def test_a_consumer_that_falls_behind_is_told_to_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.transport.frame_bus._BACKLOG", 3)
    worker = await world.worker("w1")
    await world.submit_new(edge="edge-a")
    owned = await worker.claim_one()
    async with FrameBus(world.client, "edge-a") as bus:
        signals = aiter(bus)
        assert await anext(signals) == Resubscribed()
        for n in range(1, 6):
            await worker.append(owned, n, tokens(1, n))
        async with asyncio.timeout(60):
            while bus._signals.empty() or frame_numbers(bus._signals._queue[-1]) != [5]:  # type: ignore[attr-defined]  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await anext(signals) == Resubscribed()
        assert frame_numbers(await anext(signals)) == [4]


def frame_numbers(signal: Resubscribed | tuple[Frame, ...]) -> list[int]:
    return [frame.n for frame in signal] if isinstance(signal, tuple) else []


async def test_a_tool_follows_to_the_terminal_event(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    owned = await worker.claim_one()

    async def produce() -> None:
        for n, event in enumerate((started(1), tokens(1, 2), tokens(1, 3)), start=1):
            await worker.append(owned, n, event)
            await asyncio.sleep(0.02)
        await worker.append(owned, 4, ended(1), is_final=True)

    producing = asyncio.create_task(produce())
    followed = [item async for item in world.reading.follow(request.request_id, poll_s=0.01)]
    await producing
    assert followed == await world.log(request.request_id)
    rest = [item.n async for item in world.reading.follow(request.request_id, after=2)]
    assert rest == [3, 4]
    assert [item async for item in world.reading.follow(request.request_id, after=4)] == []
