"""When an absent lease means a dead worker, and looking for such workers at little cost.

Leases are looked at eight times in their life, so that a death is noticed soon after the lease has run out; who might
have died is asked less often.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Set
from typing import Final, Generic, TypeVar

from common.errors import LogUnavailable
from common.transport.client import LogClient
from common.transport.leases import Lease
from common.transport.queues import Queues

_T = TypeVar("_T", bound=Hashable)
Place = tuple[int, str]  # partition and worker

LOOKS_PER_TTL: Final = 8
_CHUNK: Final = 512  # leases that one command looks at
_SLOW_LOOK_S: Final = 0.2


class AbsenceWatch(Generic[_T]):
    """The two-look rule: absent now, and absent at a look some time ago, and at all looks between.

    After an outage of the server every lease is gone until its holder has renewed it; one look would make every
    worker take over from every other.
    """

    def __init__(self) -> None:
        self._since: dict[_T, float] = {}

    def look(self, absent: Set[_T], now: float, patience_s: float) -> list[_T]:
        """What has been absent for ``patience_s``, given what is absent now (``now`` from a monotonic clock)."""
        self._since = {name: self._since.get(name, now) for name in absent}
        return [name for name, since in self._since.items() if now - since >= patience_s]

    def forget(self) -> None:
        """A look failed: start again."""
        self._since.clear()


class DeathWatch:
    """Finds the workers of one model whose leases are gone for good. Belongs to one event loop."""

    def __init__(self, client: LogClient, queues: Queues, lease: Lease) -> None:
        """``lease``: the looker's own, whose time to live is taken to be everybody's."""
        self._lease = lease
        self._num_lapses = lease.num_lapses
        self._me = lease.worker
        self._client = client
        self._queues = queues
        self._ttl_s = lease.ttl_s
        self._watch: AbsenceWatch[Place] = AbsenceWatch()
        self._known: frozenset[Place] = frozenset()
        self._ask_again_at = 0.0
        self._doubt_until = 0.0

    async def look(self) -> list[Place]:
        """(partition, worker) of the consumers whose leases have been absent for a quarter of their life; for half of
        it after a failure, a reconnection or a look so slow that the server may have stood still. Where the looker's
        own lease is absent, too, or has been since the last look, the server takes no writes, was away or its clock has
        leapt: that says nothing about others.

        Raises `LogUnavailable`.
        """
        generation, started = self._client.generation, time.monotonic()
        try:
            if started >= self._ask_again_at:
                others = await self._queues.other_consumers()
                self._known = frozenset(others | {(partition, self._me) for partition, _ in others})
                self._ask_again_at = started + self._ttl_s / 2
            absent = await self._absent()
        except LogUnavailable:
            self._doubt()
            raise
        now = time.monotonic()
        if self._client.generation != generation or now - started > max(self._ttl_s / 2, _SLOW_LOOK_S):
            self._doubt()
        if self._lease.num_lapses != self._num_lapses:
            self._num_lapses = self._lease.num_lapses
            self._doubt()
        blind = {partition for partition, name in absent if name == self._me}
        if blind:
            self._doubt()
        absent = {place for place in absent if place[0] not in blind}
        dead = self._watch.look(absent, now, self._ttl_s / (2 if now < self._doubt_until else 4))
        if dead:
            self._ask_again_at = 0.0  # they are about to be forgotten
        return dead

    def _doubt(self) -> None:
        self._watch.forget()
        self._doubt_until = time.monotonic() + 2 * self._ttl_s

    async def _absent(self) -> set[Place]:
        if self._client.connections.is_cluster:
            by_partition: dict[int, list[Place]] = {}
            for place in self._known:
                by_partition.setdefault(place[0], []).append(place)
            return {place for places in by_partition.values() for place in await self._without_lease(places)}
        # One server: a worker whose lease is there in one partition renews it in all.
        samples = {name: (partition, name) for partition, name in self._known}
        suspects = {name for _, name in await self._without_lease(samples.values())}
        return set(await self._without_lease(place for place in self._known if place[1] in suspects))

    async def _without_lease(self, places: Iterable[Place]) -> list[Place]:
        found, rest = [], list(places)
        for start in range(0, len(rest), _CHUNK):
            part = rest[start : start + _CHUNK]
            names = [self._client.keys.lease(partition, worker) for partition, worker in part]
            values = await self._client.command("MGET", *names, key=names[0])
            found += [place for place, value in zip(part, values, strict=True) if value is None]
        return found
