"""What edges and tools read: one request from any position, and the push channel of an edge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

from common.events import Recorded
from common.transport.client import LogClient
from common.transport.records import Attached, Frame, RequestStatus, Resubscribed


class Reading:
    """Reads requests from the log."""

    def __init__(self, client: LogClient) -> None:
        self._client = client

    async def attach(self, request_id: str, *, after: int, edge_id: str, limit: int = 1000) -> Attached:
        """Register the edge for the request's frames, mark the request as read, and read up to ``limit`` events.

        Registering comes first, so an event is either among those returned or pushed to the edge's `FrameBus`.
        An empty ``edge_id`` reads without registering.

        Raises `StreamExpired` when the request is unknown or past retention, `LogUnavailable`, `LogCorrupt`.
        """
        raise NotImplementedError

    async def detach(self, request_id: str, edge_id: str) -> None:
        """Stop pushing the request's frames to this edge."""

    async def keep_alive(self, request_ids: Iterable[str]) -> None:
        """Say that these requests still have readers. To be called every `RedisSettings.reader_refresh_s`."""

    async def read_range(self, request_id: str, *, after: int, limit: int = 1000) -> list[Recorded]:
        """Events after+1 ... in order, at most ``limit``; empty when there are none (or the log has expired)."""
        raise NotImplementedError

    def follow(self, request_id: str, *, after: int = 0, poll_s: float = 0.1) -> AsyncIterator[Recorded]:
        """Events from after+1 to the terminal one, by polling: for tools, not for edges."""
        raise NotImplementedError

    async def status(self, request_id: str) -> RequestStatus:
        """Where the request stands. Raises `StreamExpired` when it is unknown."""
        raise NotImplementedError


class FrameBus:
    """The one push connection of an edge. A frame is a hint: it may be lost or repeated, never invented.

    ``async with FrameBus(client, edge_id) as bus: async for signal in bus: ...`` yields `Resubscribed` (first of all
    too, and after every reconnection) and tuples of frames, for ever; connection loss is handled inside.
    """

    def __init__(self, client: LogClient, edge_id: str) -> None:
        self._client = client
        self._edge_id = edge_id

    async def __aenter__(self) -> FrameBus:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def __aiter__(self) -> AsyncIterator[Resubscribed | tuple[Frame, ...]]:
        raise NotImplementedError
