"""Submitting: once, within limits, durable before it returns."""

from __future__ import annotations

import asyncio
import time

import pytest

from common.errors import IdempotencyConflict, InvalidRequest, Overloaded
from common.events import SamplingParams
from common.transport import (
    AdmissionLimits,
    Duplicate,
    RequestPhase,
    Submitted,
    idempotent_request_id,
    scripts,
)
from common.transport.client import LogClient
from tests.behaviour.transport.world import MODEL, World


async def test_a_submitted_request_is_queued_with_its_spec(world: World) -> None:
    request = await world.submit_new()
    attached = await world.reading.attach(request.request_id, after=0, edge_id="edge-a")
    assert attached.spec == request
    assert (attached.phase, attached.events, attached.last_n) == (RequestPhase.QUEUED, (), 0)
    stats = await world.registry.queue_stats(MODEL)
    assert (stats.depth, stats.waiting, stats.tokens) == (1, 1, 13)


async def test_the_same_body_again_is_a_duplicate_that_tells_the_state(world: World) -> None:
    worker = await world.worker("w1")
    request = world.request(request_id=idempotent_request_id("tenant", "key", 3))
    assert await world.submit(request) == Submitted(request.request_id)
    assert await world.submit(request) == Duplicate(request.request_id, RequestPhase.QUEUED)
    owned = await worker.claim_one()
    assert await world.submit(request) == Duplicate(request.request_id, RequestPhase.RUNNING)
    await worker.finish(owned)
    assert await world.submit(request) == Duplicate(request.request_id, RequestPhase.DONE)
    await world.assert_queues_clean()


async def test_another_body_under_the_same_id_is_a_conflict(world: World) -> None:
    request = await world.submit_new()
    with pytest.raises(IdempotencyConflict):
        await world.submit(request, fingerprint="other")
    assert (await world.registry.queue_stats(MODEL)).depth == 1


async def test_a_repeated_script_call_is_accepted_once_and_answered_alike(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = LogClient.run

    async def twice(self: LogClient, script: scripts.Script, *args: object, **options: object) -> object:
        first = await sent(self, script, *args, **options)  # type: ignore[arg-type]
        assert await sent(self, script, *args, **options) == first  # type: ignore[arg-type]
        return first

    monkeypatch.setattr(LogClient, "run", twice)
    await world.submit_new()
    monkeypatch.undo()
    assert (await world.registry.queue_stats(MODEL)).depth == 1


async def test_two_edges_that_submit_the_same_key_at_once_enqueue_it_once(world: World) -> None:
    request = world.request(request_id=idempotent_request_id("t", "k", 3))
    results = await asyncio.gather(*(world.submit(request) for _ in range(8)))
    assert sum(isinstance(result, Submitted) for result in results) == 1
    assert (await world.registry.queue_stats(MODEL)).depth == 1


async def test_requests_over_the_limit_are_refused_with_a_time_to_retry(world: World) -> None:
    limits = AdmissionLimits(max_requests=2, max_tokens=10_000)
    for k in range(2):
        await world.submit(world.request(request_id=f"{k}-{_uuid(k)}"), limits=limits)
    late = world.request(request_id=f"1-{_uuid(9)}")
    with pytest.raises(Overloaded) as refused:
        await world.submit(late, limits=limits)
    assert 1 <= refused.value.retry_after_s <= 60
    worker = await world.worker("w1")
    await worker.finish(await worker.claim_one())
    assert await world.submit(late, limits=limits) == Submitted(late.request_id)


@pytest.mark.parametrize("spread", [(0, 0, 0, 0, 0, 0), (0, 1, 2, 0, 1, 2), (2, 2, 2, 2, 2, 1)], ids=str)
async def test_a_limit_is_met_exactly_however_requests_fall_on_partitions(
    world: World, spread: tuple[int, ...]
) -> None:
    limits = AdmissionLimits(max_requests=len(spread), max_tokens=len(spread) * 13)  # a request counts 13
    for k, partition in enumerate(spread):
        await world.submit(world.request(request_id=f"{partition}-{_uuid(k)}"), limits=limits)
    for partition in range(3):
        late = world.request(request_id=f"{partition}-{_uuid(99)}")
        with pytest.raises(Overloaded) as refused:
            await world.submit(late, limits=limits)
        assert refused.value.reason == "queue_requests"
        assert refused.value.message.startswith("6 requests")
        with pytest.raises(Overloaded) as refused:
            await world.submit(late, limits=AdmissionLimits(max_requests=100, max_tokens=6 * 13 + 12))
        assert refused.value.reason == "queue_tokens"
    for partition in range(3):  # what waits in a lower class does not count
        await world.submit(
            world.request(request_id=f"{partition}-{_uuid(50)}", priority=-1),
            limits=AdmissionLimits(max_requests=partition + 1, max_tokens=100),
        )


async def test_many_that_come_at_once_over_all_partitions_are_admitted_up_to_the_limit(world: World) -> None:
    limits = AdmissionLimits(max_requests=20, max_tokens=10_000)
    sent = [world.submit(world.request(request_id=f"{k % 3}-{_uuid(k)}"), limits=limits) for k in range(60)]
    results = await asyncio.gather(*sent, return_exceptions=True)
    admitted = sum(isinstance(result, Submitted) for result in results)
    assert admitted == 20 or (world.client.connections.is_cluster and admitted >= 20)
    assert all(isinstance(result, Submitted | Overloaded) for result in results)


async def test_what_a_lost_request_was_counted_for_is_forgotten_with_its_entry(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    key = world.client.keys.request(request.request_id)
    await world.raw("DEL", key, key=key)
    assert await worker.ownership.claim(1, block_ms=50) == []
    assert (await world.registry.queue_stats(MODEL)).tokens == 0


async def test_tokens_over_the_limit_are_refused_until_earlier_requests_end(world: World) -> None:
    limits = AdmissionLimits(max_requests=1000, max_tokens=30)
    big = SamplingParams(max_tokens=17)
    await world.submit(world.request(request_id=f"0-{_uuid(1)}", sampling=big), limits=limits)
    late = world.request(request_id=f"2-{_uuid(2)}", sampling=big)
    with pytest.raises(Overloaded):
        await world.submit(late, limits=limits)
    worker = await world.worker("w1")
    await worker.finish(await worker.claim_one())
    assert await world.submit(late, limits=limits) == Submitted(late.request_id)


async def test_one_request_larger_than_the_token_limit_is_admitted_alone(world: World) -> None:
    limits = AdmissionLimits(max_requests=1000, max_tokens=3)
    await world.submit(world.request(), limits=limits)


async def test_a_backlog_of_low_priority_does_not_refuse_higher_classes(world: World) -> None:
    limits = AdmissionLimits(max_requests=1, max_tokens=10_000)
    await world.submit(world.request(request_id=f"0-{_uuid(1)}", priority=5), limits=limits)
    with pytest.raises(Overloaded):
        await world.submit(world.request(request_id=f"0-{_uuid(2)}", priority=5), limits=limits)
    await world.submit(world.request(request_id=f"0-{_uuid(3)}"), limits=limits)
    await world.submit(world.request(request_id=f"0-{_uuid(4)}", priority=-1), limits=limits)


async def test_the_time_to_retry_follows_the_measured_drain(world: World) -> None:
    worker = await world.worker("w1")
    for k in range(4):
        await world.submit(world.request(request_id=f"0-{_uuid(k)}"))
        await worker.finish(await worker.claim_one())
    load = world.client.keys.load(0, MODEL)
    await world.raw("HSET", load, "rate", "0.1", key=load)
    limits = AdmissionLimits(max_requests=1, max_tokens=10_000)
    await world.submit(world.request(request_id=f"0-{_uuid(20)}"), limits=limits)
    with pytest.raises(Overloaded) as refused:
        await world.submit(world.request(request_id=f"0-{_uuid(21)}"), limits=limits)
    assert refused.value.retry_after_s == pytest.approx(10.0)


async def test_counters_that_a_failover_spoilt_heal_when_nothing_is_admitted(world: World) -> None:
    load = world.client.keys.load(0, MODEL)
    await world.raw("HSET", load, "tokens:4", "999999", key=load)
    limits = AdmissionLimits(max_requests=100, max_tokens=300)
    await world.submit(world.request(request_id=f"0-{_uuid(1)}"), limits=limits)
    assert (await world.registry.queue_stats(MODEL)).tokens == 13


async def test_an_accepted_request_outlives_its_deadline_by_an_hour(world: World) -> None:
    request = world.request(deadline_s=time.time() + 100)
    await world.submit(request)
    key = world.client.keys.request(request.request_id)
    assert 3600 <= await world.raw("TTL", key, key=key) <= 3700


@pytest.mark.parametrize("request_id", ["", "x", "7-zz", "99-018f0000-0000-7000-8000-000000000000", "-1-2", "0-{evil}"])
async def test_an_id_of_another_deployment_is_refused(world: World, request_id: str) -> None:
    with pytest.raises(InvalidRequest):
        await world.submit(world.request(request_id=request_id))


def _uuid(k: int) -> str:
    return f"018f0000-0000-7000-8000-{k:012x}"
