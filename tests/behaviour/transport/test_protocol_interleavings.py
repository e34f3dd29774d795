"""The ownership protocol under chosen interleavings: two workers and an edge, killed, frozen and cut off between calls.

Tokens are drawn at random and carry a checksum of everything before them, so that a token lost, repeated or taken from
another attempt shows. Between bursts of calls it is looked whether something waits that no worker would find.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import secrets
import zlib
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import LogUnavailable
from common.events import CancelReason, Ended, OutputEvent, Recorded, Tokens, Usage
from common.request_state import fold
from common.transport import (
    AppendItem,
    AppendStatus,
    Keys,
    LogClient,
    Owned,
    Ownership,
    RedisSettings,
    idempotent_request_id,
)
from common.transport.connecting import connect
from common.transport.connections import Connections
from common.transport.keys import GROUP, QueueClass
from tests.behaviour.transport.gate import Actor, Gate, GatedConnections
from tests.behaviour.transport.world import MODEL, World, started
from tests.servers import Server

REQUESTS = 6
LENGTH = 12  # tokens of a finished request
VERDICTS = ["run"] * 8 + ["lose", "lose", "drop", "kill", "expire", "expire", "expire", "renew"]
Step = tuple[int, str, int]
"""Actor, what happens to its next call, and how many calls it may make."""


@dataclass
class Deployment:
    """What all actors of one example share. Everything that survives a kill is here or in Redis."""

    connections: Connections
    settings: RedisSettings
    ids: list[str]
    accepted: set[str] = field(default_factory=set)
    views: dict[str, list[Recorded]] = field(default_factory=dict)
    incarnations: int = 0

    async def expire_all_leases(self) -> None:
        for number in range(1, self.incarnations + 1):
            key = self.client().keys.lease(0, f"w{number}")
            await self.connections.execute("DEL", key, key=key)

    def client(self, gate: Gate | None = None) -> LogClient:
        connections = GatedConnections(self.connections, gate) if gate else self.connections
        return LogClient(self.settings, connections, Keys(self.settings.key_prefix, 1))


async def edge(deployment: Deployment, gate: Gate) -> None:
    """Submits (again, after a kill), follows all requests, and cancels one that has started and one that has not."""
    world = World(deployment.client(gate))
    for k, request_id in enumerate(deployment.ids):
        request = world.request(request_id=request_id, tenant="ab"[k % 2], weight=1.0 + k % 2)
        await _insist(functools.partial(world.submit, request))
        deployment.accepted.add(request_id)
    await _insist(lambda: world.submission.cancel(deployment.ids[-1], CancelReason.API, "edge"))
    while True:
        for request_id in deployment.ids:
            await follow(deployment, world, request_id)


async def follow(deployment: Deployment, world: World, request_id: str) -> None:
    view = deployment.views.setdefault(request_id, [])
    after = len(view)
    view += (await _insist(lambda: world.reading.attach(request_id, after=after, edge_id="edge", limit=2))).events
    if request_id == deployment.ids[0] and len(view) == 3:
        await _insist(lambda: world.submission.cancel(request_id, CancelReason.API, "edge"))


async def _insist(call):  # type: ignore[no-untyped-def]
    while True:
        with contextlib.suppress(LogUnavailable):
            return await call()


@dataclass
class Running:
    owned: Owned
    ids: tuple[int, ...]
    last_n: int
    is_started: bool = False
    cancel: CancelReason | None = None
    unsure: AppendItem | None = None  # sent, not answered: must be sent again as it is

    def next_item(self) -> AppendItem:
        if self.unsure is None:
            events, is_final = self._next_events()
            self.unsure = AppendItem(self.owned.request.request_id, self.owned.epoch, self.last_n + 1, events, is_final)
        return self.unsure

    def _next_events(self) -> tuple[tuple[OutputEvent, ...], bool]:
        epoch = self.owned.epoch
        if not self.is_started:
            return (started(epoch, self.last_n),), False
        if self.cancel or len(self.ids) >= 2 * LENGTH:
            return (Ended(epoch=epoch, t=2.0, usage=Usage(), cancelled=self.cancel),), True
        return (Tokens(epoch=epoch, t=1.0, choice=0, token_ids=chained(self.ids)),), False

    def appended(self, item: AppendItem) -> None:
        self.last_n = item.first_n + len(item.events) - 1
        self.is_started = True
        self.ids += tuple(i for event in item.events if isinstance(event, Tokens) for i in event.token_ids)
        self.unsure = None


def chained(ids: tuple[int, ...]) -> tuple[int, int]:
    return secrets.randbits(24), zlib.crc32(repr(ids).encode())


class FakeEngine:
    """A worker's loop: claim, take over, append one event a round to everything that runs."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self.running: dict[str, Running] = {}
        self._rounds = 0

    async def round(self) -> None:
        self._rounds += 1
        taken = await self._ownership.claim(2 - len(self.running), block_ms=1)
        if self._rounds % 3 == 0:
            taken += await self._ownership.takeover_scan(2)
        for owned in taken:
            ids = fold(list(owned.events)).choice(0).token_ids
            self.running[owned.request.request_id] = Running(owned, ids, owned.last_n, cancel=owned.cancel)
        items = [running.next_item() for running in self.running.values()]
        for item, outcome in zip(items, await self._ownership.append(items), strict=True):
            running = self.running[item.request_id]
            assert outcome.status is not AppendStatus.GAP
            if outcome.status is AppendStatus.FENCED or item.is_final:
                del self.running[item.request_id]
            else:
                running.appended(item)
                running.cancel = outcome.cancel


class Worker:
    """A slot in which incarnations follow each other; the lease is set from outside, as time would."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self.lease = deployment.client().lease("unborn")

    async def run(self, gate: Gate) -> None:
        self._deployment.incarnations += 1
        client = self._deployment.client(gate)
        self.lease = client.lease(f"w{self._deployment.incarnations}")
        self.lease.ttl_s = 0.0  # patience between two looks
        await self.set_lease()
        engine = FakeEngine(Ownership(client, model=MODEL, lease=self.lease, max_attempts=10_000))
        while True:
            with contextlib.suppress(LogUnavailable):
                await engine.round()

    async def set_lease(self) -> None:
        key = self._deployment.client().keys.lease(0, self.lease.worker)
        await self._deployment.connections.execute("SET", key, self.lease.token, key=key)

    async def expire_lease(self) -> None:
        key = self._deployment.client().keys.lease(0, self.lease.worker)
        await self._deployment.connections.execute("DEL", key, key=key)


async def perform(deployment: Deployment, steps: list[Step]) -> None:
    workers = [Worker(deployment), Worker(deployment)]
    actors = [Actor(lambda gate: edge(deployment, gate)), *(Actor(worker.run) for worker in workers)]
    try:
        for index, verdict, count in steps:
            worker = workers[index - 1] if index else None
            if verdict == "kill":
                if worker is not None:
                    await worker.expire_lease()
                await actors[index].restart()
            elif verdict == "expire" and worker is not None:
                await worker.expire_lease()
            elif verdict == "renew" and worker is not None:
                await worker.set_lease()
            else:
                for _ in range(count):
                    await actors[index].step("run")
                if verdict in ("lose", "drop"):
                    await actors[index].step(verdict)
            await assert_no_one_waits_unseen(deployment)
        await deployment.expire_all_leases()
        await finish(deployment)
        await actors[0].kill()
        before = await logs(deployment)
        for actor in actors[1:]:  # the frozen ones wake up, and find everything taken
            actor.gate.open()
        await asyncio.sleep(0.02)
        assert await logs(deployment) == before
    finally:
        for actor in actors:
            await actor.kill()


_UNREAD = """
for _, group in ipairs(redis.pcall('XINFO', 'GROUPS', KEYS[1])) do
  for k = 1, #group, 2 do
    if group[k] == 'last-delivered-id' then return #redis.call('XRANGE', KEYS[1], '(' .. group[k + 1], '+') end
  end
end
return redis.call('XLEN', KEYS[1])
"""


async def assert_no_one_waits_unseen(deployment: Deployment) -> None:
    """A worker that blocks on the streams wakes up as long as anything waits: something is unread, or was read by a
    worker that moves up the next as soon as it owns it."""
    client = deployment.client()
    backlog = client.keys.backlog(0, MODEL, QueueClass.NORMAL)
    if not await client.command("ZCARD", backlog, key=backlog):
        return
    stream = client.keys.queue(0, MODEL, QueueClass.NORMAL)
    if await client.command("EVAL", _UNREAD, 1, stream, GROUP, key=stream):
        return
    for _, fields in await client.command("XRANGE", stream, "-", "+", key=stream):
        key = client.keys.request((fields[b"rid"] if isinstance(fields, dict) else fields[1]).decode())
        if await client.command("HGET", key, "state", key=key) != b"running":
            return
    raise AssertionError("something waits behind a stream in which everything was taken up")


async def finish(deployment: Deployment) -> None:
    """A sound worker takes over whatever is left."""
    world = World(deployment.client())
    heir = Worker(deployment)
    heir.lease = world.client.lease("heir")
    heir.lease.ttl_s = 0.0
    await heir.set_lease()
    engine = FakeEngine(Ownership(world.client, model=MODEL, lease=heir.lease, max_attempts=10_000))
    for _ in range(200):
        await engine.round()
        if not engine.running and (await world.registry.queue_stats(MODEL)).depth == 0:
            return
    raise AssertionError("requests are left over")


async def logs(deployment: Deployment) -> dict[str, list[Recorded]]:
    world = World(deployment.client())
    return {request_id: await world.log(request_id) for request_id in deployment.ids}


async def check(deployment: Deployment) -> None:
    world = World(deployment.client())
    await world.assert_queues_clean()
    for request_id, log in (await logs(deployment)).items():
        if request_id not in deployment.accepted and not log:
            continue
        state = fold(log)  # contiguous, epochs never fall, nothing after the end
        assert state.is_terminal, request_id
        assert deployment.views.get(request_id, []) == log[: len(deployment.views.get(request_id, []))]
        ids = state.choice(0).token_ids
        for k in range(0, len(ids), 2):
            assert ids[k + 1] == zlib.crc32(repr(ids[:k]).encode()), "a token of another attempt"
        assert state.cancelled or len(ids) == 2 * LENGTH


STEPS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from(VERDICTS), st.integers(1, 8)), min_size=60, max_size=160)


@pytest.mark.timeout(900)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(STEPS, st.integers(0, 2**32))
def test_every_accepted_request_ends_once_and_its_log_is_whole(valkey: Server, steps: list[Step], seed: int) -> None:
    async def example() -> None:
        log = RedisSettings(redis_url=valkey.url, key_prefix=f"{secrets.token_hex(6)}:", partitions=1, redis_retry_s=30)
        connections = connect(log)
        ids = [idempotent_request_id("t", f"{seed}-{k}", 1) for k in range(REQUESTS)]
        deployment = Deployment(connections, log, ids)
        try:
            await asyncio.wait_for(perform(deployment, shuffled(steps, seed)), 200)
            await check(deployment)
        finally:
            await connections.close()

    asyncio.run(example())


def shuffled(steps: list[Step], seed: int) -> list[Step]:
    """Longer runs than hypothesis likes to draw: the drawn steps, and as many again in another order."""
    more = list(steps)
    random.Random(seed).shuffle(more)
    return steps + more
