"""Many callers in one queue: what one may hold, who is claimed first, and where one stands."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from common.errors import Overloaded, TenantLimitReached
from common.transport import AdmissionLimits, RequestPhase
from common.transport.client import LogClient
from tests.behaviour.transport.world import MODEL, World


def id_of(k: int, partition: int = 0) -> str:
    return f"{partition}-018f0000-0000-7000-8000-{k:012x}"


async def flood(world: World, tenant: str, count: int, *, first: int = 0, partition: int = 0) -> list[str]:
    ids = [id_of(first + k, partition) for k in range(count)]
    for request_id in ids:
        await world.submit(world.request(request_id=request_id, tenant=tenant))
    return ids


async def test_a_tenant_that_floods_the_queue_does_not_starve_another(world: World) -> None:
    worker = await world.worker("w1")
    await flood(world, "flood", 60)
    quiet = await flood(world, "quiet", 3, first=1000)
    claimed = [owned.request.request_id for owned in await worker.ownership.claim(8)]
    assert set(quiet) < set(claimed)


async def test_a_tenant_alone_waits_in_order_of_arrival(world: World) -> None:
    worker = await world.worker("w1")
    sent = await flood(world, "only", 10)
    assert [owned.request.request_id for owned in await worker.ownership.claim(10)] == sent


async def test_one_tenant_may_hold_so_much_over_the_whole_deployment(world: World, client: LogClient) -> None:
    limits = AdmissionLimits(max_requests=1000, max_tokens=10**6, max_tenant_requests=3)
    for partition in range(3):
        await world.submit(world.request(request_id=id_of(1, partition), tenant="a"), limits=limits)
    more = world.request(request_id=id_of(2, 1), tenant="a")
    with pytest.raises(TenantLimitReached) as refused:
        await world.submit(more, limits=limits)
    assert refused.value.reason == "tenant_requests"
    assert 1 <= refused.value.retry_after_s <= 60
    await world.submit(world.request(request_id=id_of(3, 1), tenant="b"), limits=limits)
    worker = await world.worker("w1")
    for owned in await worker.ownership.claim(10):
        await worker.finish(owned)
    await world.submit(more, limits=limits)
    load = client.keys.load(1, MODEL)
    assert not await world.raw("HEXISTS", load, "tn:b", key=load)


async def test_a_tenants_requests_of_one_partition_use_the_whole_limit(world: World) -> None:
    limits = AdmissionLimits(max_requests=1000, max_tokens=10**6, max_tenant_requests=6)
    for k in range(6):
        await world.submit(world.request(request_id=id_of(k, 2), tenant="a"), limits=limits)
    for partition in range(3):
        with pytest.raises(TenantLimitReached):
            await world.submit(world.request(request_id=id_of(9, partition), tenant="a"), limits=limits)


async def test_a_tenants_tokens_are_bounded_too(world: World) -> None:
    limits = AdmissionLimits(max_requests=1000, max_tokens=10**6, max_tenant_tokens=3 * 20)  # a request counts 13
    await world.submit(world.request(request_id=id_of(1, 0), tenant="a"), limits=limits)
    for partition in range(3):
        request = world.request(request_id=id_of(2, partition), tenant="a")
        with contextlib.suppress(TenantLimitReached):
            await world.submit(request, limits=limits)
    stats = await world.registry.queue_stats(MODEL)
    assert stats.tokens <= 60


async def test_the_reason_of_a_refusal_is_told(world: World) -> None:
    await world.submit(world.request(request_id=id_of(1)), limits=AdmissionLimits(max_requests=1, max_tokens=25))
    with pytest.raises(Overloaded) as requests:
        await world.submit(world.request(request_id=id_of(2)), limits=AdmissionLimits(max_requests=1, max_tokens=600))
    with pytest.raises(Overloaded) as tokens:
        await world.submit(world.request(request_id=id_of(2)), limits=AdmissionLimits(max_requests=300, max_tokens=25))
    assert (requests.value.reason, tokens.value.reason) == ("queue_requests", "queue_tokens")


async def test_a_waiting_request_knows_its_place(world: World) -> None:
    ids = await flood(world, "", 4)
    assert await places(world, ids) == [0, 1, 2, 3]
    worker = await world.worker("w1")
    first, second = await worker.ownership.claim(2)
    assert await places(world, ids) == [None, None, 0, 1]
    urgent = world.request(request_id=id_of(99), priority=-1)
    await world.submit(urgent)
    assert await places(world, [*ids, urgent.request_id]) == [None, None, 1, 2, 0]
    for owned in (first, second):
        await worker.finish(owned)
    await asyncio.sleep(0.01)  # a rate needs a time
    place = await world.reading.queue_place(ids[2])
    assert place is not None
    assert place.drain_rate > 0
    assert place.estimated_wait_s == pytest.approx(2 / place.drain_rate)


async def test_requests_of_other_partitions_stand_before_when_they_came_before(world: World) -> None:
    (first,) = await flood(world, "", 1, partition=2)
    (second,) = await flood(world, "", 1, partition=0)
    assert (await places(world, [first]))[0] == 0
    assert (await places(world, [second]))[0] in (0, 1)  # within the same millisecond nobody was first


async def test_the_highest_class_alone_can_be_claimed(world: World) -> None:
    worker = await world.worker("w1")
    await flood(world, "", 2)
    assert await worker.ownership.claim_urgent(4) == []
    urgent = world.request(request_id=id_of(50), priority=-3)
    await world.submit(urgent)
    (owned,) = await worker.ownership.claim_urgent(4)
    assert owned.request == urgent
    assert (await world.reading.status(urgent.request_id)).phase is RequestPhase.RUNNING


async def places(world: World, ids: list[str]) -> list[int | None]:
    found = [await world.reading.queue_place(request_id) for request_id in ids]
    return [None if place is None else place.ahead for place in found]
