"""A worker's inbox: one stream a partition, read from its start (a worker's name is its incarnation's own)."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

from common.events import InboxEvent, decode_inbox
from common.transport.client import LogClient
from common.transport.connections import MAX_BLOCK_MS

_COUNT: Final = 100
_CLUSTER_POLL_S: Final = 0.1


class Inbox:
    """Remembers up to where each stream was read."""

    def __init__(self, client: LogClient, worker: str) -> None:
        self._client = client
        self._read_to = {client.keys.inbox(partition, worker): "0-0" for partition in range(client.keys.partitions)}

    async def read(self, block_ms: int) -> list[InboxEvent]:
        """What is new; with ``block_ms`` waits for the first entry."""
        if not self._client.connections.is_cluster:
            return self._take(await self._read(list(self._read_to), min(block_ms, MAX_BLOCK_MS)))
        until = time.monotonic() + block_ms / 1000
        while True:
            events = [event for name in self._read_to for event in self._take(await self._read([name], 0))]
            if events or time.monotonic() >= until:
                return events
            await asyncio.sleep(_CLUSTER_POLL_S)

    async def _read(self, names: list[str], block_ms: int) -> Any:
        streams = ("STREAMS", *names, *(self._read_to[name] for name in names))
        if block_ms:
            return await self._client.blocking("XREAD", "COUNT", _COUNT, "BLOCK", block_ms, *streams, key=names[0])
        return await self._client.command("XREAD", "COUNT", _COUNT, *streams, key=names[0])

    def _take(self, reply: Any) -> list[InboxEvent]:
        events = []
        for name, entries in reply or ():
            for entry_id, fields in entries:
                self._read_to[name.decode()] = entry_id.decode()
                events.append(decode_inbox(fields[b"d"] if isinstance(fields, dict) else fields[1]))
        return events
