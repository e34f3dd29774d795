"""More calls at once than there may be connections: they wait for each other, and nothing counts as lost."""

from __future__ import annotations

import asyncio

from common.transport import LogClient, RedisSettings
from tests.behaviour.transport.world import MODEL, World


async def test_a_burst_of_calls_waits_for_connections_and_reconnects_nobody(log_settings: RedisSettings) -> None:
    client = await LogClient.open(log_settings.model_copy(update={"redis_max_connections": 2, "redis_timeout_s": 60.0}))
    try:
        world = World(client)
        requests = [world.request() for _ in range(100)]
        await asyncio.gather(*(world.submit(request) for request in requests))
        key = client.keys.workers
        await asyncio.gather(*(client.command("EXISTS", key, key=key) for _ in range(100)))
        await asyncio.gather(*(world.registry.queue_stats(MODEL) for _ in range(20)))
        assert (await world.registry.queue_stats(MODEL)).depth == 100
        assert client.generation == 0
    finally:
        await client.close()
