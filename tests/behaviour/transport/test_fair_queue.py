"""Weighted fair queueing of tenants: shares of a backlog, and a backlog under everything that happens to requests."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import LogUnavailable, Overloaded
from common.events import CancelReason, EngineRequest, SamplingParams
from common.request_state import fold
from common.transport import AdmissionLimits, CancelOutcome, LogClient, Owned, QueueClass, RedisSettings, RequestPhase
from common.transport.giving_up import GivingUp
from common.transport.keys import GROUP
from tests.behaviour.transport.world import MODEL, Worker, World
from tests.servers import Server

PROMPT = 3  # tokens of a prompt of `World.request`


def id_of(k: int, partition: int = 0) -> str:
    return f"{partition}-018f0000-0000-7000-8000-{k:012x}"


async def submit(world: World, k: int, tenant: str = "", weight: float = 1.0, cost: int = 13, priority: int = 0) -> str:
    """A request that counts for ``cost`` tokens; its id, which is the k-th."""
    request = world.request(
        request_id=id_of(k),
        tenant=tenant,
        weight=weight,
        priority=priority,
        sampling=SamplingParams(max_tokens=cost - PROMPT, seed=1),
    )
    await world.submit(request)
    return request.request_id


async def served(worker: Worker, seats: int = 1) -> list[EngineRequest]:
    """Everything there is, in the order in which it is claimed."""
    order = []
    while owned := await worker.ownership.claim(seats):
        order += [one.request for one in owned]
        for one in owned:
            await worker.finish(one)
    return order


def cost_of(request: EngineRequest) -> int:
    return PROMPT + request.sampling.max_tokens


async def waiting(world: World, queue_class: QueueClass = QueueClass.NORMAL, partition: int = 0) -> int:
    key = world.client.keys.backlog(partition, MODEL, queue_class)
    return int(await world.raw("ZCARD", key, key=key))


# shares


@pytest.mark.parametrize("heavy_first", [True, False])
async def test_backlogs_are_served_by_weight_whoever_came_first(world: World, heavy_first: bool) -> None:
    worker = await world.worker("w1")
    tenants = [("a", 4.0), ("b", 1.0)] if heavy_first else [("b", 1.0), ("a", 4.0)]
    for number, (tenant, weight) in enumerate(tenants):
        for k in range(40):
            await submit(world, 1000 * number + k, tenant, weight)
    first = Counter(request.tenant for request in (await served(worker))[:50])
    assert abs(first["a"] - 40) <= 1
    await world.assert_queues_clean()


async def test_shares_are_of_tokens_and_not_of_requests(world: World) -> None:
    worker = await world.worker("w1")
    for k in range(40):
        await submit(world, k, "long", cost=40)
    for k in range(40):
        await submit(world, 100 + k, "short", cost=10)
    first = Counter(request.tenant for request in (await served(worker, seats=3))[:25])
    assert abs(first["short"] - 20) <= 1


async def test_a_light_tenant_is_next_however_long_the_backlog_of_others(world: World) -> None:
    worker = await world.worker("w1")
    for k in range(50):
        await submit(world, k, "flood")
    for k in range(5):  # between requests of the flood, again and again
        running = await worker.claim_one()
        await submit(world, 100 + k, "light")
        owned = await worker.ownership.claim(2)  # one request of the flood was in the stream already
        assert [one.request.tenant for one in owned] == ["flood", "light"]
        for one in [running, *owned]:
            await worker.finish(one)
    await served(worker)


async def test_pausing_earns_nothing(world: World) -> None:
    """A tenant that was away while another was served starts level with it."""
    worker = await world.worker("w1")
    for k in range(60):
        await submit(world, k, "busy")
    for _ in range(20):
        await worker.finish(await worker.claim_one())
    for k in range(30):
        await submit(world, 100 + k, "back")
    first = Counter(request.tenant for request in (await served(worker))[:20])
    assert abs(first["back"] - 10) <= 1


async def test_what_is_cancelled_while_it_waits_is_not_charged(world: World) -> None:
    worker = await world.worker("w1")
    await submit(world, 0, "other")
    ids = [await submit(world, 1 + k, "fickle") for k in range(20)]
    for request_id in ids:
        assert await world.submission.cancel(request_id, CancelReason.API, "e") is CancelOutcome.ENDED
    for k in range(10):
        await submit(world, 100 + k, "other")
        await submit(world, 200 + k, "fickle")
    order = await served(worker)
    assert abs(Counter(request.tenant for request in order[:11])["fickle"] - 5) <= 1
    await world.assert_queues_clean()


SIZES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(4, 60)), min_size=12, max_size=40)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(SIZES, st.tuples(*[st.sampled_from([0.25, 0.5, 1.0, 3.0, 4.0, 10.0])] * 3), st.integers(1, 4))
def test_shares_are_within_one_request_of_the_weights(
    valkey: Server, sizes: list[tuple[str, int]], weights: tuple[float, ...], seats: int
) -> None:
    weight = dict(zip("abc", weights, strict=True))

    async def example() -> None:
        log = RedisSettings(redis_url=valkey.url, key_prefix=f"{secrets.token_hex(6)}:", partitions=1)
        client = await LogClient.open(log)
        world = World(client)
        try:
            worker = await world.worker("w1")
            left: Counter[str] = Counter()
            largest: dict[str, float] = dict.fromkeys("abc", 0.0)
            for k, (tenant, cost) in enumerate(sizes):
                await submit(world, k, tenant, weight[tenant], cost)
                left[tenant] += 1
                largest[tenant] = max(largest[tenant], cost / weight[tenant])
            got = dict.fromkeys("abc", 0.0)
            order = await served(worker, seats)
            assert len(order) == len(sizes)
            for request in order:
                got[request.tenant] += cost_of(request) / weight[request.tenant]
                left[request.tenant] -= 1
                backlogged = [tenant for tenant in "abc" if left[tenant] > 0]
                for one in backlogged:
                    for other in backlogged:
                        assert abs(got[one] - got[other]) <= largest[one] + largest[other] + 1e-6
            for tenant in "abc":
                of_tenant = [request.request_id for request in order if request.tenant == tenant]
                assert of_tenant == sorted(of_tenant)  # each in order of arrival
        finally:
            world.close()
            await client.close()

    asyncio.run(example())


# nothing waits while a worker idles


async def test_idle_workers_find_all_that_is_submitted_at_once(world: World) -> None:
    workers = [await world.worker(f"w{k}") for k in range(6)]
    for turn in range(4):
        # As long as one read may block: what is left waiting beside a worker that sleeps is not found in time.
        claims = [asyncio.create_task(worker.ownership.claim(1, block_ms=5000)) for worker in workers]
        await asyncio.gather(*(submit(world, 100 * turn + k, f"t{k % 2}") for k in range(6)))
        owned: list[tuple[Worker, list[Owned]]] = [
            (worker, await claim) for worker, claim in zip(workers, claims, strict=True)
        ]
        assert [len(found) for _, found in owned] == [1] * 6
        for worker, found in owned:
            await worker.finish(found[0])
    await world.assert_queues_clean()


async def test_an_idle_system_keeps_no_backlog(world: World) -> None:
    worker = await world.worker("w1")
    for k in range(3):
        await submit(world, k)
        assert await waiting(world) == 0
        await worker.finish(await worker.claim_one())


async def test_something_unread_stands_in_the_stream_as_long_as_anything_waits(world: World) -> None:
    worker = await world.worker("w1")
    for k in range(6):
        await submit(world, k)
    assert await waiting(world) == 5
    left = [5, 4, 3, 2, 1, 0]
    for k in range(6):
        queue = world.client.keys.queue(0, MODEL, QueueClass.NORMAL)
        assert await world.raw("XLEN", queue, key=queue) == k + 1  # those that run, and the next
        assert await waiting(world) == left[k]
        await worker.claim_one()


# what happens to those that wait


async def test_a_waiting_request_is_cancelled_at_once(world: World) -> None:
    worker = await world.worker("w1")
    ids = [await submit(world, k) for k in range(5)]
    for k in (3, 0, 1):  # in the backlog; in the stream, as it was put there; in the stream, moved up
        assert await world.submission.cancel(ids[k], CancelReason.API, "e") is CancelOutcome.ENDED
        assert await world.submission.cancel(ids[k], CancelReason.API, "e") is CancelOutcome.OVER
        assert fold(await world.log(ids[k])).cancelled is CancelReason.API
    stats = await world.registry.queue_stats(MODEL)
    assert (stats.depth, stats.tokens) == (2, 26)
    assert [request.request_id for request in await served(worker)] == [ids[2], ids[4]]
    await world.assert_queues_clean()


async def test_requests_that_nobody_owns_can_be_given_up_while_they_wait(world: World) -> None:
    ids = [await submit(world, k) for k in range(4)]
    for k in (2, 0, 1):
        assert await GivingUp(world.client).give_up(ids[k], LogUnavailable("nobody"), begun_too=False)
    worker = await world.worker("w1")
    assert [request.request_id for request in await served(worker)] == [ids[3]]
    await world.assert_queues_clean()


async def test_a_request_that_was_read_and_not_owned_can_be_cancelled(world: World) -> None:
    worker = await world.worker("w1")
    ids = [await submit(world, k) for k in range(3)]
    queue = world.client.keys.queue(0, MODEL, QueueClass.NORMAL)
    await worker.finish(await worker.claim_one())
    await world.raw("XREADGROUP", "GROUP", GROUP, "w1", "STREAMS", queue, ">", key=queue)
    assert await world.submission.cancel(ids[1], CancelReason.API, "e") is CancelOutcome.ENDED
    assert await worker.ownership.recheck_history() == []
    assert [request.request_id for request in await served(worker)] == [ids[2]]
    await world.assert_queues_clean()


async def test_a_deadline_passes_while_a_request_waits(world: World) -> None:
    worker = await world.worker("w1")
    await submit(world, 0)
    late = world.request(request_id=id_of(1), deadline_s=1.0)
    await world.submit(late)
    assert [request.request_id for request in await served(worker)] == [id_of(0)]
    (failed,) = await world.log(late.request_id)
    assert getattr(failed.event, "code", None) == "deadline_exceeded"
    await world.assert_queues_clean()


async def test_what_was_handed_over_goes_before_what_waits(world: World) -> None:
    worker, other = await world.worker("w1"), await world.worker("w2")
    ids = [await submit(world, k, "a" if k else "b") for k in range(5)]
    first, second = await worker.ownership.claim(2)
    for owned in (second, first):
        assert await worker.ownership.release(owned.request.request_id)
    assert [request.request_id for request in await served(other)] == [ids[1], ids[0], *ids[2:]]
    await world.assert_queues_clean()


async def test_classes_come_before_tenants(world: World) -> None:
    worker = await world.worker("w1")
    for k in range(6):
        await submit(world, k, "a", weight=10.0)
    for k in range(3):
        await submit(world, 100 + k, "b", weight=0.1, priority=-1)
    claimed = [one.request.priority for one in await worker.ownership.claim(5)]
    assert claimed == [-1, -1, -1, 0, 0]
    assert await worker.ownership.claim_urgent(3) == []


async def test_the_urgent_among_those_that_wait_can_be_claimed_alone(world: World) -> None:
    worker = await world.worker("w1")
    for k in range(3):
        await submit(world, k)
        await submit(world, 100 + k, priority=-1)
    claimed = await worker.ownership.claim_urgent(8)
    assert [one.request.request_id for one in claimed] == [id_of(100 + k) for k in range(3)]


async def test_requests_that_a_dead_worker_had_moved_up_are_taken_over(world: World) -> None:
    dead, heir = await world.worker("w1"), await world.worker("w2")
    ids = [await submit(world, k) for k in range(6)]
    await dead.ownership.claim(2)
    queue = world.client.keys.queue(0, MODEL, QueueClass.NORMAL)
    await world.raw("XREADGROUP", "GROUP", GROUP, "w1", "STREAMS", queue, ">", key=queue)  # read, and not yet owned
    dead.die()
    taken: list[Owned] = []
    while len(taken) < 3:
        taken += await heir.ownership.takeover_scan(8)
    assert [one.request.request_id for one in taken] == ids[:3]
    for one in taken:
        await heir.finish(one)
    assert [request.request_id for request in await served(heir)] == ids[3:]
    await world.assert_queues_clean()


async def test_a_request_whose_hash_is_gone_does_not_stop_those_behind_it(world: World) -> None:
    worker = await world.worker("w1")
    for k in range(4):
        await submit(world, k)
    for k in (0, 2):
        key = world.client.keys.request(id_of(k))
        await world.raw("DEL", key, key=key)
    order: list[str] = []
    for _ in range(8):
        for one in await worker.ownership.claim(1):
            order.append(one.request.request_id)
            await worker.finish(one)
    assert order == [id_of(1), id_of(3)]
    stats = await world.registry.queue_stats(MODEL)
    assert stats.depth == 0


async def test_what_waits_counts_for_admission_and_for_the_depth(world: World) -> None:
    limits = AdmissionLimits(max_requests=4, max_tokens=1000)
    for k in range(4):
        await world.submit(world.request(request_id=id_of(k)), limits=limits)
    with pytest.raises(Overloaded):
        await world.submit(world.request(request_id=id_of(9)), limits=limits)
    stats = await world.registry.queue_stats(MODEL)
    assert (stats.depth, stats.waiting, stats.depth_by_class["normal"]) == (4, 4, 4)
    worker = await world.worker("w1")
    await worker.claim_one()
    stats = await world.registry.queue_stats(MODEL)
    assert (stats.depth, stats.running, stats.waiting) == (4, 1, 3)


async def test_the_place_of_a_waiting_request_is_its_turn(world: World) -> None:
    worker = await world.worker("w1")
    for k in range(4):
        await submit(world, k, "flood")
    await submit(world, 10, "light")
    await submit(world, 11, priority=-1)
    places = {}
    for request_id in [id_of(k) for k in (0, 1, 2, 3, 10, 11)]:
        place = await world.reading.queue_place(request_id)
        assert place is not None
        places[request_id] = place.ahead
    claimed = [one.request.request_id for one in await worker.ownership.claim(6)]
    assert [places[request_id] for request_id in claimed] == [0, 1, 2, 3, 4, 5]
    assert claimed[:3] == [id_of(11), id_of(0), id_of(10)]
    assert await world.reading.queue_place(id_of(3)) is None


async def test_each_partition_has_a_backlog_and_all_are_served(world: World) -> None:
    worker = await world.worker("w1")
    for partition in range(3):
        for k in range(5):
            await world.submit(world.request(request_id=id_of(k, partition)))
    place = await world.reading.queue_place(id_of(4, 1))
    assert place is not None
    assert 4 <= place.ahead <= 14
    assert len(await served(worker, seats=2)) == 15
    await world.assert_queues_clean()


async def test_an_accepted_request_that_waits_is_a_duplicate_to_its_repetition(world: World) -> None:
    await submit(world, 0)
    request = world.request(request_id=id_of(1))
    await world.submit(request)
    duplicate = await world.submit(request)
    assert getattr(duplicate, "phase", None) is RequestPhase.QUEUED
    assert await waiting(world) == 1


# bounds


async def test_no_more_than_some_tenants_are_remembered(world: World) -> None:
    worker = await world.worker("w1")
    key = world.client.keys.turns(0, MODEL, QueueClass.NORMAL)
    await submit(world, 0, "t")
    await submit(world, 1, "t")
    await world.raw("ZADD", key, *(part for k in range(4095) for part in (20 + k % 2, f"t:{k}")), key=key)
    await submit(world, 2, "one more")
    assert await world.raw("ZCARD", key, key=key) < 4096
    assert len(await served(worker)) == 3


async def test_tenants_are_forgotten_as_the_others_catch_up(world: World) -> None:
    worker = await world.worker("w1")
    for k in range(10):
        await submit(world, k, f"t{k}", cost=10)
    for k in range(4):
        await submit(world, 100 + k, "busy", cost=50)
    await served(worker)
    key = world.client.keys.turns(0, MODEL, QueueClass.NORMAL)
    assert set(await world.raw("ZRANGE", key, 0, -1, key=key)) == {b"now", b"t:busy"}
    await submit(world, 200)
    assert not await world.raw("EXISTS", key, key=key)  # nobody else is there


async def test_who_has_much_running_as_the_first_has_to_wait_is_not_next_again(world: World) -> None:
    worker = await world.worker("w1")
    for k in range(4):
        await submit(world, k, "busy")
        await worker.claim_one()
    for k in range(6):
        await submit(world, 10 + k, "busy")
    for k in range(6):
        await submit(world, 100 + k, "new")
    tenants = [one.request.tenant for one in await worker.ownership.claim(7)]
    assert tenants == ["busy", *["new"] * 5, "busy"] or tenants == ["busy", *["new"] * 6]


@pytest.mark.parametrize("are_cancelled", [False, True])
async def test_no_key_is_left_behind(world: World, are_cancelled: bool) -> None:
    worker = await world.worker("w1")
    made = [await submit(world, k, f"t{k % 2}", priority=k % 3 - 1) for k in range(6)]
    for request_id in reversed(made if are_cancelled else []):
        await world.submission.cancel(request_id, CancelReason.API, "test")
    await served(worker)
    kept = {"req", "out", "q", "load", "wk", "partitions"}
    prefix = world.client.settings.key_prefix
    for name in await world.client.connections.scan(f"{prefix}*"):
        kind = name.decode().removeprefix(prefix).split(":")[1]
        if kind == "turns":  # of nobody, soon
            assert 0 < await world.raw("TTL", name, key=name.decode()) <= 600
        else:
            assert kind in kept, name


# what former versions left


async def test_a_log_of_the_former_layout_is_drained_in_its_order(world: World) -> None:
    """All requests in streams, those of tenants with less in a stream of their own."""
    worker = await world.worker("w1")
    for k in range(4):
        await submit(world, k)
    keys = world.client.keys
    backlog = keys.backlog(0, MODEL, QueueClass.NORMAL)
    await world.raw("DEL", backlog, key=backlog)
    for k, queue_class in ((1, QueueClass.NORMAL), (2, QueueClass.UNDERSERVED), (3, QueueClass.NORMAL)):
        queue, request = keys.queue(0, MODEL, queue_class), keys.request(id_of(k))
        entry = await world.raw("XADD", queue, "*", "rid", id_of(k), key=queue)
        await world.raw("HDEL", request, "wait", "share", key=request)
        await world.raw("HSET", request, "q", int(queue_class), "qid", entry, key=request)
    turns = keys.turns(0, MODEL, QueueClass.NORMAL)
    await world.raw("DEL", turns, key=turns)
    await submit(world, 4)
    assert await waiting(world) == 1
    assert [request.request_id for request in await served(worker)] == [id_of(k) for k in (2, 0, 1, 3, 4)]
    await world.assert_queues_clean()
