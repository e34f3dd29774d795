"""What edges and tools read: one request from any position."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from common.errors import StreamExpired
from common.events import TERMINAL, CancelReason, Recorded, decode_request
from common.transport import scripts
from common.transport.client import LogClient
from common.transport.frame_bus import FrameBus
from common.transport.keys import GROUP, WAITING
from common.transport.log import read_page, recorded
from common.transport.records import Attached, QueuePlace, RequestPhase, RequestStatus

__all__ = ["FrameBus", "Reading"]

_MOST_EDGES = 8  # that frames of one request are pushed to; further readers read
_BATCH = 256  # requests that one script looks at
_Standing = tuple[str, bytes | int]
_MOST_COUNTED = 10_000  # entries of one queue, to tell a position


class Reading:
    """Reads requests from the log."""

    def __init__(self, client: LogClient) -> None:
        self._client = client

    async def attach(self, request_id: str, *, after: int, edge_id: str, limit: int = 1000) -> Attached:
        """Register the edge for the request's frames, mark the request as read, and read up to ``limit`` events.

        Registering comes first, so an event is either among those returned or pushed to the edge's `FrameBus`.
        An empty ``edge_id`` reads without registering.

        Raises `StreamExpired` when the request is unknown or past retention, `InvalidRequest` for a malformed id,
        `LogUnavailable`, `LogCorrupt`.
        """
        keys = self._client.keys
        reply = await self._client.run(
            scripts.ATTACH,
            [keys.request(request_id), keys.output(request_id)],
            [edge_id, after, limit, _MOST_EDGES],
        )
        if reply is None:
            raise StreamExpired.of(request_id)
        phase, spec, grace_ms, length, entries = reply
        return Attached(
            request_id=request_id,
            phase=RequestPhase(phase.decode()),
            spec=decode_request(spec),
            events=tuple(recorded(entries, after)),
            last_n=length,
            grace_s=int(grace_ms) / 1000,
        )

    async def detach(self, request_id: str, edge_id: str) -> None:
        """Stop pushing the request's frames to this edge."""
        await self._client.run(scripts.SEEN, [self._client.keys.request(request_id)], [edge_id])

    async def keep_alive(self, request_ids: Iterable[str]) -> None:
        """Say that these requests still have readers. To be called every `RedisSettings.reader_refresh_s`."""
        for batch in self._batches(request_ids):
            await self._client.run(scripts.SEEN, [self._client.keys.request(request_id) for request_id in batch], [""])

    async def lengths(self, request_ids: Iterable[str]) -> dict[str, int | None]:
        """How many events each of these requests has; None for one that is unknown or past its retention.

        Raises `LogUnavailable`, and `InvalidRequest` for a malformed id.
        """
        keys = self._client.keys
        found: dict[str, int | None] = {}
        for batch in self._batches(request_ids):
            names = [name for request_id in batch for name in (keys.request(request_id), keys.output(request_id))]
            lengths = await self._client.run(scripts.LENGTHS, names, [])
            found |= {key: length if length >= 0 else None for key, length in zip(batch, lengths, strict=True)}
        return found

    def _batches(self, request_ids: Iterable[str]) -> Iterator[list[str]]:
        """As many of one partition as one script takes."""
        by_partition: dict[int, list[str]] = {}
        for request_id in request_ids:
            by_partition.setdefault(self._client.keys.partition(request_id), []).append(request_id)
        for ids in by_partition.values():
            for start in range(0, len(ids), _BATCH):
                yield ids[start : start + _BATCH]

    async def read_range(self, request_id: str, *, after: int, limit: int = 1000) -> list[Recorded]:
        """Events after+1 ... in order, at most ``limit``; empty when there are none (or the log has expired).

        Raises `LogUnavailable`, `LogCorrupt`, and `InvalidRequest` for a malformed id.
        """
        return await read_page(self._client, request_id, after, limit)

    async def follow(self, request_id: str, *, after: int = 0, poll_s: float = 0.1) -> AsyncIterator[Recorded]:
        """Events from after+1 to the terminal one, by polling: for tools, not for edges.

        Ends early when the log has expired. Raises as `attach` does.
        """
        while True:
            attached = await self.attach(request_id, after=after, edge_id="")
            for item in attached.events:
                yield item
                if isinstance(item.event, TERMINAL):
                    return
            after += len(attached.events)
            if attached.phase is RequestPhase.DONE and not attached.events:
                return
            if not attached.events:
                await asyncio.sleep(poll_s)

    async def request_ids(self) -> list[str]:
        """Every request the log knows, ended ones within their retention too. For tools: it walks over all keys."""
        keys = self._client.keys
        found: list[str] = []
        for partition in range(keys.partitions):
            pattern = keys.all_requests(partition)
            names = await self._client.retrying(functools.partial(self._client.connections.scan, pattern))
            found += [name.decode().rpartition(":req:")[2] for name in names]
        return found

    async def queue_place(self, request_id: str) -> QueuePlace | None:
        """Where the request stands in its queue; None when it does not wait (any more, or at all)."""
        name = self._client.keys.request(request_id)
        fields = ("state", "q", "qid", "wait", "model")
        state, queue_class, entry_id, waiting, model = await self._client.command("HMGET", name, *fields, key=name)
        if state is None or RequestPhase(state.decode()) is not RequestPhase.QUEUED:
            return None
        here = self._client.keys.partition(request_id)
        others = [partition for partition in range(self._client.keys.partitions) if partition != here]
        if entry_id == WAITING:
            parts = [await self._ahead(here, model.decode(), queue_class, ("waiting", waiting))]
            stands: _Standing = ("elsewhere", parts[0][1])
        else:
            stands = ("entry", entry_id)
            parts = [await self._ahead(here, model.decode(), queue_class, stands)]
        parts += await asyncio.gather(*(self._ahead(other, model.decode(), queue_class, stands) for other in others))
        return QueuePlace(ahead=sum(int(part[0]) for part in parts), drain_rate=sum(float(part[2]) for part in parts))

    async def _ahead(self, partition: int, model: str, queue_class: bytes, stands: _Standing) -> list[Any]:
        """What one partition says: see the head of the script."""
        keys = self._client.keys
        names = [keys.load(partition, model), *keys.queues(partition, model), *keys.backlogs(partition, model)]
        reply: list[Any] = await self._client.run(scripts.PLACE, names, [GROUP, queue_class, _MOST_COUNTED, *stands])
        return reply

    async def status(self, request_id: str) -> RequestStatus:
        """Where the request stands. Raises `StreamExpired` when it is unknown."""
        keys = self._client.keys
        name = keys.request(request_id)
        fields = ("state", "epoch", "owner", "attempts", "cancel", "cancel_by", "edges", "submitted", "seen", "ended",
                  "deadline", "model")  # fmt: skip
        values = await self._client.command("HMGET", name, *fields, key=name)
        if values[0] is None:
            raise StreamExpired.of(request_id)
        text = {field: (value or b"").decode() for field, value in zip(fields, values, strict=True)}
        output = keys.output(request_id)
        return RequestStatus(
            request_id=request_id,
            model=text["model"],
            phase=RequestPhase(text["state"]),
            epoch=int(text["epoch"]),
            owner=text["owner"],
            attempts=int(text["attempts"]),
            cancel=CancelReason(text["cancel"]) if text["cancel"] else None,
            cancelled_by=text["cancel_by"],
            edges=tuple(edge for edge in text["edges"].split(",") if edge),
            submitted_s=int(text["submitted"]) / 1000,
            seen_s=int(text["seen"]) / 1000,
            ended_s=int(text["ended"]) / 1000 if text["ended"] else None,
            deadline_s=int(text["deadline"]) / 1000 if text["deadline"] else None,
            last_n=await self._client.command("XLEN", output, key=output),
        )
