"""The queues of one model as a worker reads them: groups, new entries in priority order, its own history."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from common.transport import scripts
from common.transport.client import GroupMissing, LogClient
from common.transport.connections import MAX_BLOCK_MS
from common.transport.failures import ResponseError
from common.transport.keys import BACKLOGGED, GROUP, QueueClass
from common.transport.leases import Lease

_AGING: Final = 8  # every so many reads begin at a lower class, so that none starves
_HISTORY_COUNT: Final = 10_000
_CLUSTER_POLL_S: Final = 0.025


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry that is pending with this worker."""

    partition: int
    queue_class: QueueClass
    entry_id: str
    request_id: str


class Queues:
    """Reads one model's queues for one worker."""

    def __init__(self, client: LogClient, model: str, lease: Lease) -> None:
        self._client = client
        self._lease = lease
        self._turn = 0
        keys = client.keys
        self._places: dict[str, tuple[int, QueueClass]] = {
            keys.queue(partition, model, queue_class): (partition, queue_class)
            for partition in range(keys.partitions)
            for queue_class in QueueClass
        }
        self._names = {place: name for name, place in self._places.items()}
        self._backlogs: dict[tuple[int, QueueClass], tuple[str, str]] = {
            place: (keys.backlog(place[0], model, place[1]), keys.turns(place[0], model, place[1]))
            for place in self._names
            if place[1] in BACKLOGGED
        }

    async def ensure_groups(self) -> None:
        """Create every stream and its group; what was queued before is delivered too."""
        for name in self._places:
            await self._client.retrying(functools.partial(self._create_group, name))

    async def _create_group(self, name: str) -> None:
        try:
            await self._client.connections.execute("XGROUP", "CREATE", name, GROUP, "0", "MKSTREAM", key=name)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def read_new(self, count: int, classes: Sequence[QueueClass] | None = None) -> list[Entry] | None:
        """Up to ``count`` new entries in priority order, without waiting; None while the lease is not held.

        ``classes``: only these, in this order.
        """
        found: list[Entry] = []
        for partitions in self._reading_order():
            room = count - len(found)
            if room <= 0:
                break
            places = [(partition, c) for c in classes or self._class_order() for partition in partitions]
            waiting = {place: number for number, place in enumerate(filter(self._backlogs.__contains__, places), 1)}
            names = [self._client.keys.lease(partitions[0], self._lease.worker)]
            names += [self._names[place] for place in places]
            names += [name for place in waiting for name in self._backlogs[place]]
            arguments = [GROUP, self._lease.worker, self._lease.token, room]
            arguments += [waiting.get(place, 0) for place in places]
            reply = await self.with_groups(functools.partial(self._client.run_once, scripts.CLAIM, names, arguments))
            if reply is None:
                return found or None
            for index, entry_id, request_id in zip(reply[::3], reply[1::3], reply[2::3], strict=True):
                partition, queue_class = places[index - 1]
                found.append(Entry(partition, queue_class, entry_id.decode(), request_id.decode()))
        self._turn += 1
        return found

    async def wait_new(self, count: int, block_ms: int) -> list[Entry]:
        """As `read_new`, waiting for the first entry. The lease must be held.

        A standalone server is asked to block. In a cluster that would take a connection a partition, so there it is
        asked again and again.
        """
        if not self._client.connections.is_cluster:
            names = list(self._places)
            command: tuple[Any, ...] = ("XREADGROUP", "GROUP", GROUP, self._lease.worker, "COUNT", 1)
            block = ("BLOCK", max(min(block_ms, MAX_BLOCK_MS), 1), "STREAMS", *names, *(">" for _ in names))
            return self._entries(await self.with_groups(lambda: self._client.blocking(*command, *block, key=names[0])))
        until = time.monotonic() + block_ms / 1000
        while time.monotonic() < until:
            await asyncio.sleep(min(_CLUSTER_POLL_S, block_ms / 1000))
            if found := await self.read_new(count):
                return found
        return []

    async def read_history(self) -> list[Entry]:
        """Everything that is pending with this worker."""
        entries: list[Entry] = []
        for partitions in self._reading_order():
            names = [self._names[partition, c] for c in QueueClass for partition in partitions]
            command: tuple[Any, ...] = (
                "XREADGROUP",
                "GROUP",
                GROUP,
                self._lease.worker,
                "COUNT",
                _HISTORY_COUNT,
                "STREAMS",
            )
            command += (*names, *("0" for _ in names))
            entries += self._entries(
                await self.with_groups(lambda command=command, key=names[0]: self._client.command(*command, key=key))
            )
        return entries

    async def with_groups(self, operation: Any) -> Any:
        """The operation; when a group has vanished, create the groups and answer nothing this time."""
        try:
            return await operation()
        except GroupMissing:
            await self.ensure_groups()
            return []

    async def other_consumers(self) -> set[tuple[int, str]]:
        """(partition, worker) of all that are known to the groups, without this one."""
        found: set[tuple[int, str]] = set()
        for partitions in self._reading_order():
            places = [(partition, queue_class) for partition in partitions for queue_class in QueueClass]
            names = [self._names[place] for place in places]
            reply = await self.with_groups(lambda names=names: self._client.run(scripts.CONSUMERS, names, [GROUP]))
            for (partition, _), consumers in zip(places, reply, strict=False):  # nothing when a group has vanished
                found.update((partition, consumer.decode()) for consumer in consumers)
        return {place for place in found if place[1] != self._lease.worker}

    async def take(self, partition: int, dead: str, count: int) -> list[Entry]:
        """Up to ``count`` pending entries of a worker whose lease is gone, in order of priority; they are pending with
        this one now. A queue in which it had none forgets it."""
        keys, lease = self._client.keys, self._lease
        queues = [self._names[partition, queue_class] for queue_class in QueueClass]
        names = [keys.lease(partition, dead), keys.lease(partition, lease.worker), *queues]
        arguments = [GROUP, dead, lease.worker, lease.token, count]
        reply = await self.with_groups(lambda: self._client.run(scripts.TAKEOVER, names, arguments)) or []
        classes = list(QueueClass)
        return [
            Entry(partition, classes[index - 1], entry_id.decode(), request_id.decode())
            for index, entry_id, request_id in zip(reply[::3], reply[1::3], reply[2::3], strict=True)
        ]

    def _entries(self, reply: Any) -> list[Entry]:
        entries = []
        for name, items in reply or ():
            partition, queue_class = self._places[name.decode()]
            for entry_id, fields in items:
                if fields:  # what was deleted while pending comes without fields
                    request_id = fields[b"rid"] if isinstance(fields, dict) else fields[1]
                    entries.append(Entry(partition, queue_class, entry_id.decode(), request_id.decode()))
        return entries

    def _reading_order(self) -> list[list[int]]:
        """Partitions in turn, in groups that one call may cover: all at once, or each alone in a cluster."""
        count = self._client.keys.partitions
        rotated = [(self._turn + k) % count for k in range(count)]
        return [[partition] for partition in rotated] if self._client.connections.is_cluster else [rotated]

    def _class_order(self) -> Sequence[QueueClass]:
        order = list(QueueClass)
        if self._turn % _AGING == _AGING - 1:
            first = QueueClass.LOW if (self._turn // _AGING) % 2 else QueueClass.NORMAL
            order.remove(first)
            order.insert(0, first)
        return order
