"""A cluster hands a partition's slot to another node while a request runs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any

from common.transport import AppendStatus, FrameBus, LogClient, RedisSettings
from common.transport.records import Frame, Resubscribed
from tests.behaviour.transport.world import World, ended, started, tokens
from tests.servers import Cluster


def move_slot(cluster: Cluster, key: str) -> None:
    """With its keys, as an operator's tool does it."""
    clients = [node.client() for node in cluster.primaries]
    try:
        slot = clients[0].execute_command("CLUSTER", "KEYSLOT", key)
        ids = [client.execute_command("CLUSTER", "MYID").decode() for client in clients]
        sizes = [client.execute_command("CLUSTER", "COUNTKEYSINSLOT", slot) for client in clients]
        source = max(range(len(clients)), key=sizes.__getitem__)
        target = (source + 1) % len(clients)
        clients[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source])
        clients[source].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        address = ("127.0.0.1", cluster.primaries[target].port)
        while keys := clients[source].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            clients[source].execute_command("MIGRATE", *address, "", 0, 5000, "REPLACE", "KEYS", *keys)
        for client in (clients[target], clients[source], *clients):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
    finally:
        for client in clients:
            client.close()


def pushed(signals: list[Any]) -> list[Frame]:
    return [frame for signal in signals if isinstance(signal, tuple) for frame in signal]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came true")


async def test_events_and_frames_follow_the_slot(cluster: Cluster) -> None:
    settings = RedisSettings(redis_url=cluster.url, key_prefix=f"{secrets.token_hex(4)}:", partitions=1)
    client = await LogClient.open(settings)
    signals: list[Any] = []
    bus = FrameBus(client, "e1")
    listening = asyncio.create_task(bus.run(signals.append))
    world = World(client)
    try:
        async with asyncio.timeout(200):
            await until(lambda: bool(signals))
            await world.submit_new(edge="e1")
            worker = await world.worker("w1")
            owned = await worker.claim_one()
            assert (await worker.append(owned, 1, started(owned.epoch))).status is AppendStatus.APPENDED
            n = 1
            for _ in range(3):
                signals.clear()
                await asyncio.to_thread(move_slot, cluster, client.keys.request(owned.request.request_id))
                await until(lambda: any(isinstance(signal, Resubscribed) for signal in signals))
                for _ in range(5):
                    n += 1
                    outcome = await worker.append(owned, n, tokens(owned.epoch, n))
                    assert outcome.status in (AppendStatus.APPENDED, AppendStatus.DUPLICATE)
                await until(lambda n=n: any(n == frame.n for frame in pushed(signals)))  # type: ignore[misc]
            last = await worker.append(owned, n + 1, ended(owned.epoch), is_final=True)
            assert last.status is AppendStatus.APPENDED
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        world.close()
        await client.close()
