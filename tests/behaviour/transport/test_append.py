"""Appending: contiguous, once, by the owner only; ending a request; pushing frames."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.events import CancelReason, encode
from common.transport import (
    AppendItem,
    AppendOutcome,
    AppendStatus,
    Frame,
    FrameBus,
    Owned,
    RequestPhase,
    Resubscribed,
)
from common.transport.keys import GROUP, QueueClass
from tests.behaviour.transport.world import MODEL, World, ended, started, tokens


async def test_events_are_numbered_from_one_without_a_gap(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    owned = await worker.claim_one()
    events = [started(1), tokens(1, 1), tokens(1, 2, 3)]
    outcome = await worker.append(owned, 1, *events)
    assert outcome == AppendOutcome(request.request_id, AppendStatus.APPENDED, 3)
    await worker.append(owned, 4, tokens(1, 4))
    log = await world.log(request.request_id)
    assert [item.n for item in log] == [1, 2, 3, 4]
    assert [item.event for item in log] == [*events, tokens(1, 4)]


async def test_the_same_append_again_changes_nothing(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    owned = await worker.claim_one()
    for status in (AppendStatus.APPENDED, AppendStatus.DUPLICATE, AppendStatus.DUPLICATE):
        outcome = await worker.append(owned, 1, started(1), tokens(1, 1))
        assert outcome == AppendOutcome(request.request_id, status, 2)


async def test_what_is_there_already_is_skipped_and_the_rest_appended(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    owned = await worker.claim_one()
    await worker.append(owned, 1, started(1), tokens(1, 1))
    outcome = await worker.append(owned, 2, tokens(1, 1), tokens(1, 2))
    assert (outcome.status, outcome.length) == (AppendStatus.APPENDED, 3)
    assert [item.event for item in await world.log(request.request_id)] == [started(1), tokens(1, 1), tokens(1, 2)]


async def test_the_final_append_again_is_a_duplicate(world: World) -> None:
    worker = await world.worker("w1")
    await world.submit_new()
    owned = await worker.claim_one()
    for status in (AppendStatus.APPENDED, AppendStatus.DUPLICATE):
        assert (await worker.append(owned, 1, started(1), ended(1), is_final=True)).status is status
    assert (await worker.append(owned, 3, tokens(1, 9))).status is AppendStatus.FENCED


async def test_a_shorter_log_is_reported_and_can_be_repaired(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    owned = await worker.claim_one()
    events = [started(1), tokens(1, 1), tokens(1, 2), tokens(1, 3)]
    await worker.append(owned, 1, *events)
    key = world.client.keys.output(request.request_id)
    await world.raw("DEL", key, key=key)  # what a failover to a lagging replica does to the tail
    await worker.append(owned, 1, *events[:2])
    outcome = await worker.append(owned, 5, tokens(1, 4))
    assert outcome == AppendOutcome(request.request_id, AppendStatus.GAP, 2)
    outcome = await worker.append(owned, outcome.length + 1, *events[2:], tokens(1, 4))
    assert outcome == AppendOutcome(request.request_id, AppendStatus.APPENDED, 5)
    assert [item.event for item in await world.log(request.request_id)] == [*events, tokens(1, 4)]


@pytest.mark.parametrize("epoch", [0, 2, 17])
async def test_another_epoch_is_fenced(world: World, epoch: int) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    await worker.claim_one()
    outcome = await worker.append((request.request_id, epoch), 1, tokens(epoch, 1))
    assert outcome.status is AppendStatus.FENCED
    assert await world.log(request.request_id) == []


async def test_another_worker_with_the_same_epoch_is_fenced(world: World) -> None:
    """A failover may forget an epoch and give it out again."""
    worker, other = await world.worker("w1"), await world.worker("w2")
    await world.submit_new()
    owned = await worker.claim_one()
    assert (await other.append(owned, 1, tokens(1, 1))).status is AppendStatus.FENCED


async def test_a_late_append_does_not_bring_an_expired_request_back(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    owned = await worker.claim_one()
    names = [world.client.keys.request(request.request_id), world.client.keys.output(request.request_id)]
    for key in names:
        await world.raw("DEL", key, key=key)
    assert (await worker.append(owned, 1, tokens(1, 1))).status is AppendStatus.FENCED
    for key in names:
        assert not await world.raw("EXISTS", key, key=key)


async def test_the_end_cleans_the_queue_and_starts_the_retention(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    owned = await worker.claim_one()
    await worker.append(owned, 1, started(1), tokens(1, 1))
    assert (await world.registry.queue_stats(MODEL)).running == 1
    await worker.append(owned, 3, ended(1), is_final=True)
    await world.assert_queues_clean()
    partition = world.client.keys.partition(request.request_id)
    for queue_class in QueueClass:
        queue = world.client.keys.queue(partition, MODEL, queue_class)
        assert await world.raw("XLEN", queue, key=queue) == 0
        pending = await world.raw("XPENDING", queue, GROUP, key=queue)
        assert (pending["pending"] if isinstance(pending, dict) else pending[0]) == 0
    for key in (world.client.keys.request(request.request_id), world.client.keys.output(request.request_id)):
        assert 800 < await world.raw("TTL", key, key=key) <= 900
    status = await world.reading.status(request.request_id)
    assert (status.phase, status.last_n) == (RequestPhase.DONE, 3)
    assert status.ended_s is not None
    assert worker.ownership.held == {}


async def test_a_running_log_lives_as_long_as_its_request(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    await worker.append(await worker.claim_one(), 1, started(1))
    key = world.client.keys.output(request.request_id)
    assert 80_000 < await world.raw("TTL", key, key=key) <= 86_400


async def test_one_call_appends_to_many_requests_of_all_partitions(world: World) -> None:
    worker = await world.worker("w1")
    for _ in range(300):
        await world.submit_new(edge="")
    owned: list[Owned] = []
    while len(owned) < 300:
        owned += await worker.ownership.claim(300)
    first = [AppendItem(item.request.request_id, 1, 1, (started(1), tokens(1, k))) for k, item in enumerate(owned)]
    outcomes = await worker.ownership.append(first)
    assert [outcome.request_id for outcome in outcomes] == [item.request_id for item in first]
    assert {outcome.status for outcome in outcomes} == {AppendStatus.APPENDED}
    last = [AppendItem(item.request.request_id, 1, 3, (ended(1),), is_final=True) for item in owned]
    await worker.ownership.append(last)
    assert (await world.log(first[7].request_id))[1].event == tokens(1, 7)
    await world.assert_queues_clean()
    assert (await worker.ownership.append([])) == []


async def test_more_requests_than_one_call_takes_are_split(world: World) -> None:
    worker = await world.worker("w1")
    ids = [f"0-018f0000-0000-7000-8000-{k:012x}" for k in range(300)]
    await asyncio.gather(*(world.submit(world.request(request_id=request_id)) for request_id in ids))
    owned = await worker.ownership.claim(300)
    assert len(owned) == 300
    outcomes = await worker.ownership.append(
        [AppendItem(item.request.request_id, 1, 1, (ended(1),), is_final=True) for item in owned]
    )
    assert {outcome.status for outcome in outcomes} == {AppendStatus.APPENDED}
    await world.assert_queues_clean()


async def test_nothing_to_append_is_a_mistake_of_the_caller(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    with pytest.raises(ValueError, match="nothing to append"):
        await worker.ownership.append([AppendItem(request.request_id, 1, 1, ())])


async def test_appended_events_are_pushed_to_the_edges_that_read_the_request(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new(edge="edge-a")
    owned = await worker.claim_one()
    async with FrameBus(world.client, "edge-a") as first, FrameBus(world.client, "edge-b") as second:
        a, b = aiter(first), aiter(second)
        assert await anext(a) == await anext(b) == Resubscribed()
        await worker.append(owned, 1, started(1), tokens(1, 1))
        both = (Frame(request.request_id, 1, encode(started(1))), Frame(request.request_id, 2, encode(tokens(1, 1))))
        assert await anext(a) == both
        await world.reading.attach(request.request_id, after=0, edge_id="edge-b")
        await worker.append(owned, 3, tokens(1, 2))
        third = (Frame(request.request_id, 3, encode(tokens(1, 2))),)
        assert await anext(a) == await anext(b) == third
        await world.reading.detach(request.request_id, "edge-a")
        await worker.append(owned, 4, tokens(1, 3))
        assert (await anext(b))[0].n == 4  # type: ignore[index]
        await worker.append(owned, 4, tokens(1, 3))  # a repetition pushes again: the first may have been lost
        assert (await anext(b))[0].n == 4  # type: ignore[index]
        await worker.append((request.request_id, 9), 5, tokens(9, 3))
        await asyncio.sleep(0.1)
        assert first._signals.empty()
        assert second._signals.empty()  # nothing fenced is ever shown


async def test_one_step_of_many_requests_reaches_an_edge_as_few_messages(world: World) -> None:
    worker = await world.worker("w1")
    for _ in range(30):
        await world.submit_new(edge="edge-a")
    owned: list[Owned] = []
    while len(owned) < 30:
        owned += await worker.ownership.claim(30)
    async with FrameBus(world.client, "edge-a") as bus:
        signals = aiter(bus)
        await anext(signals)
        await worker.ownership.append([AppendItem(o.request.request_id, 1, 1, (started(1),)) for o in owned])
        seen: set[str] = set()
        messages = 0
        while len(seen) < 30:
            frames = await anext(signals)
            assert isinstance(frames, tuple)
            seen |= {frame.request_id for frame in frames}
            messages += 1
        assert messages == (world.client.keys.partitions if world.client.connections.is_cluster else 1)


async def test_a_request_without_readers_is_reported_as_orphaned_after_its_grace_time(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new(grace_s=600)
    owned = await worker.claim_one()
    key = world.client.keys.request(request.request_id)
    for n, (age_s, cancel) in enumerate(((330, None), (640, CancelReason.ORPHANED)), start=1):
        # 30 s without a sign, plus 600 s of grace
        await world.raw("HSET", key, "seen", int((time.time() - age_s) * 1000), key=key)
        assert (await worker.append(owned, n, tokens(1, n))).cancel is cancel
    await world.reading.keep_alive([request.request_id])
    outcome = await worker.append(owned, 3, tokens(1, 3))
    assert outcome.cancel is CancelReason.ORPHANED  # once asked for, it stays


async def test_a_sign_of_a_reader_keeps_a_request_alive(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new(grace_s=0)
    owned = await worker.claim_one()
    key = world.client.keys.request(request.request_id)
    await world.raw("HSET", key, "seen", 0, key=key)
    await world.reading.keep_alive([request.request_id, world.request().request_id])
    assert (await worker.append(owned, 1, started(1))).cancel is None
