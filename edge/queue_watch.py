"""For clients that ask: where their request stands in the queue, while it waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from common.errors import LogUnavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from common.transport import QueuePlace, Reading

_INTERVAL_S: Final = 1.0


class QueueWatch:
    """The place of one request. Nothing is told while the log cannot be reached."""

    def __init__(self, reading: Reading, request_id: str, *, with_ids: bool) -> None:
        """``with_ids``: the stream carries positions, so a comment must not end a block (see `edge.sse`)."""
        self._reading = reading
        self._request_id = request_id
        self._end = b"\n" if with_ids else b"\n\n"

    async def headers(self) -> dict[str, str]:
        """``X-Headrace-Queue-Position`` (1: next) and ``X-Headrace-Estimated-Wait-S``, for a request that waits."""
        place = await self._place()
        if place is None:
            return {}
        found = {"X-Headrace-Queue-Position": str(place.ahead + 1)}
        if place.estimated_wait_s is not None:
            found["X-Headrace-Estimated-Wait-S"] = f"{place.estimated_wait_s:.1f}"
        return found

    async def comments(self, is_silent: Callable[[float], Awaitable[bool]]) -> AsyncIterator[bytes]:
        """A comment a second until the request is taken up. ``is_silent(s)``: nothing has come for s seconds."""
        while (place := await self._place()) is not None:
            wait = "" if place.estimated_wait_s is None else f" estimated_wait_s={place.estimated_wait_s:.1f}"
            yield f": queue position={place.ahead + 1}{wait}".encode() + self._end
            if not await is_silent(_INTERVAL_S):
                return

    async def _place(self) -> QueuePlace | None:
        try:
            return await self._reading.queue_place(self._request_id)
        except LogUnavailable:
            return None
