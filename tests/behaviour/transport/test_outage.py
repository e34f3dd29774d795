"""When the server dies, freezes or moves: calls are repeated, nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from common.errors import ConfigError, LogUnavailable, Overloaded
from common.events import CancelReason, Recorded
from common.transport import AppendStatus, FrameBus, LogClient, RedisSettings, Resubscribed, Submission, Submitted
from common.transport.subscription import SubscriptionLost
from tests.behaviour.transport.world import MODEL, PLENTY, Worker, World, ended, started, tokens
from tests.servers import Sentinel, Server, debian_redis, free_port, running


@pytest.fixture(params=["valkey", "redis7"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """One that the test may kill."""
    binary = debian_redis() if request.param == "redis7" else None
    if request.param == "redis7" and binary is None:
        pytest.skip("no redis-server on PATH")
    with running(Server(binary=binary, fsync="always")) as fresh:
        yield fresh


def settings(server: Server, **changes: object) -> RedisSettings:
    known: dict[str, object] = {"redis_url": server.url, "partitions": 2, "redis_retry_s": 60.0}
    return RedisSettings.model_validate({**known, **changes})


@contextlib.asynccontextmanager
async def world_on(server: Server, **changes: object) -> AsyncIterator[World]:
    client = await LogClient.open(settings(server, **changes))
    world = World(client)
    try:
        yield world
    finally:
        world.close()
        await client.close()


async def test_calls_in_flight_go_on_after_a_kill_and_a_restart(server: Server) -> None:
    async with world_on(server) as world:
        worker = await world.worker("w1")
        request = await world.submit_new()
        owned = await worker.claim_one()
        await worker.append(owned, 1, started(1), tokens(1, 1))
        server.kill()
        later = world.request()
        calls = asyncio.gather(
            world.submit(later),
            worker.append(owned, 3, tokens(1, 2)),
            world.reading.attach(request.request_id, after=0, edge_id="edge-a"),
            *(world.reading.status(request.request_id) for _ in range(20)),
        )
        await asyncio.sleep(0.3)
        server.start()
        submitted, outcome, attached, *statuses = await calls
        assert submitted == Submitted(later.request_id)
        assert (outcome.status, outcome.length) == (AppendStatus.APPENDED, 3)
        assert attached.spec == request
        assert {status.epoch for status in statuses} == {1}
        assert world.client.generation == 1  # one reconnection for all of them
        worker.lease.renew()
        (claimed,) = await worker.ownership.claim(5)
        assert claimed.request == later
        await worker.append(owned, 4, ended(1), is_final=True)
        await worker.finish(claimed)
        assert [item.n for item in await world.log(request.request_id)] == [1, 2, 3, 4]
        await world.assert_queues_clean()


async def test_what_was_acknowledged_is_there_after_every_kill(server: Server) -> None:
    async with world_on(server) as world:
        worker = await world.worker("w1")
        request = await world.submit_new()
        owned = await worker.claim_one()
        acknowledged: list[Recorded] = []

        async def produce() -> None:
            for n in range(1, 200):
                event = started(1) if n == 1 else tokens(1, n)
                outcome = await worker.append(owned, n, event)
                assert outcome.status in (AppendStatus.APPENDED, AppendStatus.DUPLICATE)
                acknowledged.append(Recorded(n, event))

        producing = asyncio.create_task(produce())
        for _ in range(3):
            await asyncio.sleep(0.05)
            server.kill()
            known = list(acknowledged)
            await asyncio.to_thread(server.start)
            assert (await world.log(request.request_id))[: len(known)] == known
        await producing
        assert await world.log(request.request_id) == acknowledged


async def test_the_push_channel_comes_back_and_says_so(server: Server) -> None:
    async with world_on(server) as world, FrameBus(world.client, "edge-a") as bus:
        worker = await world.worker("w1")
        await world.submit_new(edge="edge-a")
        owned = await worker.claim_one()
        signals = aiter(bus)
        assert await anext(signals) == Resubscribed()
        server.kill()
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(60):
            assert await anext(signals) == Resubscribed()
            await worker.append(owned, 1, started(1))
            frames = await anext(signals)
        assert isinstance(frames, tuple)
        assert frames[0].n == 1


async def test_the_push_channel_outlives_an_outage_longer_than_calls_are_repeated(server: Server) -> None:
    client = await LogClient.open(settings(server, redis_retry_s=0.1))
    try:
        async with FrameBus(client, "edge-a") as bus:
            signals = aiter(bus)
            assert isinstance(await asyncio.wait_for(anext(signals), 60), Resubscribed)
            server.kill()
            with pytest.raises(LogUnavailable):
                await client.reconnected(client.generation, SubscriptionLost("closed"))
            await asyncio.sleep(0.5)
            await asyncio.to_thread(server.start)
            assert isinstance(await asyncio.wait_for(anext(signals), 60), Resubscribed)
    finally:
        await client.close()


async def test_a_quiet_subscription_is_kept_and_one_without_answers_is_made_anew(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, seconds in (("_LOOK_S", 0.02), ("_SILENCE_S", 0.02), ("_ANSWER_S", 60.0)):
        monkeypatch.setattr(f"common.transport.subscription.{name}", seconds)
    async with world_on(server) as world, FrameBus(world.client, "edge-a") as bus:
        signals = aiter(bus)
        assert await anext(signals) == Resubscribed()
        following = asyncio.ensure_future(anext(signals))
        await asyncio.sleep(0.5)  # asked a dozen times, and it has answered
        assert not following.done()
        server.pause()
        monkeypatch.setattr("common.transport.subscription._ANSWER_S", 0.5)
        await asyncio.sleep(1.0)
        server.resume()
        async with asyncio.timeout(60):
            assert await following == Resubscribed()


async def test_without_a_server_calls_fail_in_time_with_our_error(server: Server) -> None:
    async with world_on(server, redis_retry_s=0.3) as world:
        worker = await world.worker("w1")
        request = await world.submit_new()
        server.kill()
        start = time.monotonic()
        calls = [
            world.submit(world.request()),
            world.reading.status(request.request_id),
            worker.ownership.claim(1),
            worker.ownership.claim(1, block_ms=200),
            worker.ownership.takeover_scan(1),
            worker.ownership.read_inbox(),
            world.registry.queue_stats(MODEL),
            world.client.ping(),
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(result, LogUnavailable) for result in results), results
        assert time.monotonic() - start < 60, "in time: no call hangs"
        with pytest.raises(LogUnavailable):
            worker.lease.renew()
        await asyncio.to_thread(server.start)
        worker.lease.renew()
        assert (await worker.claim_one()).request == request


async def test_a_frozen_server_is_waited_for(server: Server) -> None:
    async with world_on(server, redis_timeout_s=0.3) as world:
        request = world.request()
        server.pause()
        submitting = asyncio.create_task(world.submit(request))
        await asyncio.sleep(0.8)  # the first try has timed out; the server will still see it
        server.resume()
        assert await submitting == Submitted(request.request_id)
        assert (await world.registry.queue_stats(MODEL)).depth == 1


async def test_a_blocked_claim_survives_a_restart(server: Server) -> None:
    async with world_on(server) as world:
        worker = await world.worker("w1", lease_s=600)
        waiting = asyncio.create_task(claim_until_it_fails(worker))
        await asyncio.to_thread(until_somebody_blocks, server)
        server.kill()
        await asyncio.to_thread(server.start)
        with pytest.raises(LogUnavailable):
            await waiting
        request = await world.submit_new()
        assert (await worker.claim_one()).request == request


async def claim_until_it_fails(worker: Worker) -> None:
    while True:
        assert await worker.ownership.claim(4, block_ms=5000) == []


def until_somebody_blocks(server: Server) -> None:
    with server.client() as client:
        while not client.info("clients")["blocked_clients"]:
            time.sleep(0.01)


async def test_a_lost_script_cache_is_filled_again(server: Server) -> None:
    async with world_on(server) as world:
        worker = await world.worker("w1")
        await world.submit_new()
        await world.client.connections.on_primaries("SCRIPT", "FLUSH")
        owned = await worker.claim_one()
        await world.client.connections.on_primaries("SCRIPT", "FLUSH")
        await worker.finish(owned)
        worker.lease.renew()


async def test_a_full_server_refuses_and_loses_nothing(server: Server) -> None:
    async with world_on(server) as world:
        worker = await world.worker("w1")
        await world.submit_new()
        owned = await worker.claim_one()
        await world.client.connections.on_primaries("CONFIG", "SET", "maxmemory", "1kb")
        with pytest.raises(LogUnavailable):
            await world.submit(world.request())
        with pytest.raises(LogUnavailable):
            await worker.append(owned, 1, started(1))
        assert worker.ownership.held == {owned.request.request_id: 1}
        with pytest.raises(Overloaded, match="nearly full"):
            await Submission(world.client).submit(
                world.request(), body_fingerprint="", limits=PLENTY, edge_id="", grace_s=0
            )
        await world.client.connections.on_primaries("CONFIG", "SET", "maxmemory", "0")
        await worker.finish(owned)
        await world.assert_queues_clean()


async def test_the_partition_count_is_fixed_by_the_first_start(server: Server) -> None:
    for partitions in (2, None, 2):
        client = await LogClient.open(settings(server, partitions=partitions))
        assert client.keys.partitions == 2
        await client.close()
    with pytest.raises(ConfigError, match="2 partitions, not 4"):
        await LogClient.open(settings(server, partitions=4))
    client = await LogClient.open(settings(server, partitions=4, key_prefix="other:"))
    await client.close()


async def test_a_server_that_would_evict_or_is_not_durable_is_refused(server: Server) -> None:
    async with world_on(server, durability="strict") as world:
        control = world.client.connections
        await control.on_primaries("CONFIG", "SET", "appendfsync", "everysec")
        with pytest.raises(ConfigError, match="appendfsync"):
            await LogClient.open(settings(server, durability="strict"))
        await control.on_primaries("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
        await control.on_primaries("CONFIG", "SET", "maxmemory", "100mb")
        with pytest.raises(ConfigError, match="noeviction"):
            await LogClient.open(settings(server))


async def test_nobody_there_is_said_in_time() -> None:
    for url in (f"redis://127.0.0.1:{free_port()}", f"redis+cluster://127.0.0.1:{free_port()}"):
        with pytest.raises(LogUnavailable):
            await LogClient.open(RedisSettings(redis_url=url, redis_retry_s=0.2))
        client_url = RedisSettings(redis_url=url, redis_retry_s=0.0)
        with pytest.raises(LogUnavailable):
            await LogClient.open(client_url)


async def test_an_outage_longer_than_readers_are_waited_for_orphans_nobody() -> None:
    """The time is told to the log, and to the worker, rather than waited for."""
    patience = {"reader_timeout_s": 60.0, "redis_retry_s": 0.1}
    with running(Server()) as server:
        async with world_on(server, **patience) as world:
            worker = await world.worker("w1")
            await world.submit_new()
            owned = await worker.claim_one()
            key = world.client.keys.request(owned.request.request_id)
            await world.raw("HINCRBY", key, "seen", -100_000, key=key)
            server.kill()
            with pytest.raises(LogUnavailable):
                await worker.append(owned, 1, started(1))
            server.start()
            worker.lease.renew()
            with contextlib.suppress(LogUnavailable):  # the connection that died
                await worker.append(owned, 1, started(1))
            outcome = await worker.append(owned, 2, tokens(1, 1))
            assert (outcome.status, outcome.cancel) == (AppendStatus.APPENDED, None)
            worker.ownership._trouble_at -= 100.0
            outcome = await worker.append(owned, 3, tokens(1, 1))
            assert outcome.cancel is CancelReason.ORPHANED  # now nobody has said anything for long enough


async def test_strict_durability_waits_for_the_replicas() -> None:
    with running(Server(fsync="everysec")) as primary:
        options = {"replicaof": f"127.0.0.1 {primary.port}"}
        with running(Server(fsync="everysec", options=options)) as replica:
            strict = {"durability": "strict", "strict_replicas": 1, "strict_wait_ms": 20_000, "redis_timeout_s": 30}
            await asyncio.to_thread(primary.wait_for_replica)
            async with world_on(primary, **strict) as world, FrameBus(world.client, "edge-a") as bus:
                signals = aiter(bus)
                assert await anext(signals) == Resubscribed()
                worker = await world.worker("w1")
                await world.submit_new(edge="edge-a")
                owned = await worker.claim_one()
                await worker.append(owned, 1, started(1))
                assert (await anext(signals))[0].n == 1  # type: ignore[index]
                replica.pause()
                patient = world.client.settings
                world.client.settings = patient.model_copy(update={"strict_wait_ms": 200})
                with pytest.raises(LogUnavailable, match="0 of 1 replicas"):
                    await worker.append(owned, 2, tokens(1, 1))
                with pytest.raises(LogUnavailable, match="0 of 1 replicas"):
                    await world.submit(world.request())
                assert bus._signals.empty()  # nothing is shown that is on one machine only
                replica.resume()
                world.client.settings = patient
                outcome = await worker.append(owned, 2, tokens(1, 1))
                assert outcome.status is AppendStatus.DUPLICATE
                assert (await anext(signals))[0].n == 2  # type: ignore[index]


async def test_sentinel_names_the_new_primary_after_a_failover() -> None:
    with contextlib.ExitStack() as stack:
        primary = stack.enter_context(running(Server(fsync="everysec")))
        options = {"replicaof": f"127.0.0.1 {primary.port}"}
        stack.enter_context(running(Server(fsync="everysec", options=options)))
        await asyncio.to_thread(primary.wait_for_replica)
        sentinel = stack.enter_context(running(Sentinel(primary)))
        client = await LogClient.open(RedisSettings(redis_url=sentinel.url, partitions=2, redis_retry_s=60))
        world = World(client)
        worker = await world.worker("w1", lease_s=600)
        request = await world.submit_new()
        owned = await worker.claim_one()
        await worker.append(owned, 1, started(1))
        await asyncio.to_thread(sentinel.wait_for_replica)
        primary.kill()
        outcome = await worker.append(owned, 2, tokens(1, 1))  # again and again until the replica is the primary
        assert outcome.status is AppendStatus.APPENDED
        worker.lease.renew()
        assert [item.n for item in await world.log(request.request_id)] == [1, 2]
        await worker.append(owned, 3, ended(1), is_final=True)
        world.close()
        await client.close()
