"""Claiming and owning: order, epochs, leases, deadlines, what cannot be run."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.errors import Fenced
from common.events import CancelReason, Failed, decode_output
from common.transport import AppendStatus, FrameBus, QueueClass, RequestPhase, Resubscribed
from tests.behaviour.transport.world import MODEL, World, ended, started, tokens


async def test_a_claimed_request_is_owned_under_the_first_epoch(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    owned = await worker.claim_one()
    assert (owned.request, owned.epoch, owned.last_n, owned.events) == (request, 1, 0, ())
    assert (owned.cancel, owned.attempts) == (None, 0)
    assert 0 <= owned.queued_s < 300
    status = await world.reading.status(request.request_id)
    assert (status.phase, status.epoch, status.owner) == (RequestPhase.RUNNING, 1, "w1")
    assert worker.ownership.held == {request.request_id: 1}


async def test_a_worker_takes_no_more_than_it_asks_for(world: World) -> None:
    worker = await world.worker("w1")
    for _ in range(5):
        await world.submit_new()
    assert await worker.ownership.claim(0) == []
    assert len(await worker.ownership.claim(2)) == 2
    assert len(await worker.ownership.claim(10)) == 3
    assert await worker.ownership.claim(10) == []


async def test_higher_classes_are_claimed_first(world: World) -> None:
    worker = await world.worker("w1")
    for k, priority in enumerate((5, 0, -5, 3, 0, -1)):
        await world.submit(world.request(priority=priority, request_id=f"1-018f0000-0000-7000-8000-{k:012x}"))
    claimed = [await worker.claim_one() for _ in range(6)]
    classes = [QueueClass.of_priority(owned.request.priority) for owned in claimed]
    assert classes == [QueueClass.HIGH] * 2 + [QueueClass.NORMAL] * 2 + [QueueClass.LOW] * 2


async def test_a_low_class_is_not_starved(world: World) -> None:
    worker = await world.worker("w1")
    low = world.request(priority=9, request_id="0-018f0000-0000-7000-8000-000000000001")
    await world.submit(low)
    claimed = []
    for k in range(20):
        await world.submit(world.request(request_id=f"0-018f0000-0000-7000-8001-{k:012x}"))
        await world.submit(world.request(request_id=f"0-018f0000-0000-7000-8002-{k:012x}"))
        claimed += [owned.request.request_id for owned in await worker.ownership.claim(1)]
    assert low.request_id in claimed


async def test_a_waiting_worker_wakes_up_when_a_request_comes(world: World) -> None:
    worker = await world.worker("w1")
    waiting = asyncio.create_task(worker.ownership.claim(4, block_ms=5000))
    await asyncio.sleep(0.1)
    request = await world.submit_new()
    (owned,) = await waiting  # nothing, when the time is over
    assert owned.request == request


async def test_waiting_for_nothing_ends_in_time(world: World) -> None:
    worker = await world.worker("w1")
    start = time.monotonic()
    assert await worker.ownership.claim(4, block_ms=100) == []
    assert time.monotonic() - start > 0.05


async def test_requests_from_before_the_first_worker_are_delivered(world: World) -> None:
    request = await world.submit_new()
    worker = await world.worker("w1")
    assert (await worker.claim_one()).request == request


async def test_without_its_lease_a_worker_claims_nothing(world: World) -> None:
    worker = await world.worker("w1")
    await world.submit_new()
    worker.die()
    assert await worker.ownership.claim(1) == []
    worker.lease.renew()
    assert len(await worker.ownership.claim(1)) == 1


async def test_a_lease_that_ran_out_between_claim_and_own_loses_nothing(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    entries = await worker.ownership._queues.read_new(1)
    assert entries is not None
    worker.die()
    assert await worker.ownership.claim(1) == []
    worker.lease.renew()
    (owned,) = await worker.ownership.recheck_history()
    assert owned.request == request


async def test_another_incarnation_of_the_same_name_is_fenced(world: World) -> None:
    worker = await world.worker("w1")
    twin = world.client.lease("w1")
    with pytest.raises(Fenced):
        twin.renew()
    twin.release()  # not its own: no effect
    worker.lease.renew()
    worker.lease.release()
    worker.lease.release()
    twin.renew()
    with pytest.raises(Fenced):
        worker.lease.renew()
    twin.close()


async def test_a_lost_reply_is_found_again_in_the_history(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.transport.ownership._RECHECK_S", 3600.0)
    worker = await world.worker("w1")
    assert await worker.ownership.claim(0) == []  # checks its history; the next check is not due yet
    request = await world.submit_new()
    await worker.ownership._queues.read_new(1)  # pending with w1, but w1 never heard of it
    assert await worker.ownership.claim(1) == []
    (owned,) = await worker.ownership.recheck_history()
    assert owned.request == request
    assert await worker.ownership.recheck_history() == []


async def test_a_lost_own_reply_costs_an_epoch_and_no_attempt(world: World) -> None:
    worker = await world.worker("w1")
    await world.submit_new()
    first = await worker.claim_one()
    worker.ownership._held.clear()  # as if the answer had never come
    (second,) = await worker.ownership.recheck_history()
    assert (second.epoch, second.attempts) == (first.epoch + 1, 0)
    assert (await worker.append(first, 1, tokens(1, 5))).status is AppendStatus.FENCED
    assert (await worker.append(second, 1, tokens(2, 5))).status is AppendStatus.APPENDED


async def test_an_owner_gets_the_log_so_far(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    owned = await worker.claim_one()
    events = [started(1), *(tokens(1, k) for k in range(1500))]
    await worker.append(owned, 1, *events)
    worker.ownership._held.clear()
    (again,) = await worker.ownership.recheck_history()
    assert again.last_n == 1501
    assert [item.event for item in again.events] == events
    assert again.request == request


async def test_a_request_past_its_deadline_is_ended_before_it_runs(world: World) -> None:
    worker = await world.worker("w1")
    request = world.request(deadline_s=time.time() - 1)
    await world.submit(request)
    assert await worker.ownership.claim(1) == []
    (recorded,) = await world.log(request.request_id)
    assert isinstance(recorded.event, Failed)
    assert (recorded.event.code, recorded.event.epoch) == ("deadline_exceeded", 1)
    assert (await world.reading.status(request.request_id)).phase is RequestPhase.DONE
    await world.assert_queues_clean()


async def test_an_end_before_the_run_is_pushed_to_the_edge(world: World) -> None:
    worker = await world.worker("w1")
    request = world.request(deadline_s=time.time() - 1)
    async with FrameBus(world.client, "edge-a") as bus:
        signals = aiter(bus)
        assert await anext(signals) == Resubscribed()
        await world.submit(request)
        await worker.ownership.claim(1)
        (frame,) = await anext(signals)  # type: ignore[misc]
        assert (frame.request_id, frame.n) == (request.request_id, 1)
        assert isinstance(decode_output(frame.payload), Failed)


async def test_a_spec_that_cannot_be_understood_is_failed_not_raised(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    key = world.client.keys.request(request.request_id)
    await world.raw("HSET", key, "spec", b"\x93nonsense", key=key)
    assert await worker.ownership.claim(1) == []
    (recorded,) = await world.log(request.request_id)
    assert isinstance(recorded.event, Failed)
    assert recorded.event.code == "unknown_event"
    await world.assert_queues_clean()


async def test_an_entry_whose_request_has_expired_is_dropped(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    key = world.client.keys.request(request.request_id)
    await world.raw("DEL", key, key=key)
    assert await worker.ownership.claim(1) == []
    assert (await world.registry.queue_stats(MODEL)).depth == 0


async def test_a_request_that_nobody_reads_any_more_is_handed_out_as_orphaned(world: World) -> None:
    worker = await world.worker("w1")
    request, background = await world.submit_new(), await world.submit_new(grace_s=-1)
    for item in (request, background):
        key = world.client.keys.request(item.request_id)
        await world.raw("HSET", key, "seen", int((time.time() - 31) * 1000), key=key)
    owned = {item.request.request_id: item.cancel for item in await worker.ownership.claim(2)}
    assert owned == {request.request_id: CancelReason.ORPHANED, background.request_id: None}


async def test_groups_that_vanished_are_made_again(world: World) -> None:
    worker = await world.worker("w1")
    for name in worker.ownership._queues._places:
        await world.raw("DEL", name, key=name)
    assert await worker.ownership.claim(1) == []
    request = await world.submit_new()
    assert (await worker.claim_one()).request == request


async def test_a_released_request_goes_to_the_next_worker_first(world: World) -> None:
    leaving, staying = await world.worker("w1"), await world.worker("w2")
    request = world.request(request_id="1-018f0000-0000-7000-8000-000000000001")
    await world.submit(request)
    owned = await leaving.claim_one()
    await leaving.append(owned, 1, started(1), tokens(1, 4))
    await world.submit(world.request(request_id="1-018f0000-0000-7000-8000-000000000002", priority=-9))
    assert await leaving.ownership.release(request.request_id)
    assert not await leaving.ownership.release(request.request_id)
    assert (await leaving.append(owned, 3, tokens(1, 5))).status is AppendStatus.FENCED
    taken = await staying.claim_one()
    assert (taken.request, taken.last_n, taken.attempts) == (request, 2, 0)
    assert taken.epoch > owned.epoch
    await staying.append(taken, 3, started(taken.epoch, 2), ended(taken.epoch), is_final=True)
    await staying.finish(await staying.claim_one())
    await world.assert_queues_clean()


async def test_a_drained_inbox_gives_each_event_once(world: World) -> None:
    worker = await world.worker("w1")
    assert await worker.ownership.read_inbox() == []
    reading = asyncio.create_task(worker.ownership.read_inbox(block_ms=5000))
    await asyncio.sleep(0.05)
    await world.registry.drain("w1", handover=True)
    (drain,) = await reading
    assert getattr(drain, "handover", None) is True
    assert await worker.ownership.read_inbox() == []
