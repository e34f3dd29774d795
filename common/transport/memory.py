"""Admission stops before the server is full, so that what runs can finish."""

from __future__ import annotations

import time
from typing import Final

from common.errors import Overloaded
from common.transport.client import LogClient

_LIMIT: Final = 0.8  # of maxmemory
_LOOK_S: Final = 1.0
_RETRY_AFTER_S: Final = 5.0


class MemoryWatch:
    """How full the primaries are, looked up at most once a second."""

    def __init__(self, client: LogClient) -> None:
        self._client = client
        self._next_look = 0.0
        self._is_full = False

    async def refuse_when_full(self) -> None:
        """Raises `Overloaded` when a primary uses more than four fifths of its maxmemory, `LogUnavailable`."""
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_S  # first, so that the others do not look as well
            facts = await self._client.retrying(lambda: self._client.connections.on_primaries("INFO", "memory"))
            self._is_full = any(
                int(fact.get("used_memory", 0)) > _LIMIT * int(fact["maxmemory"])
                for fact in facts
                if int(fact.get("maxmemory", 0)) > 0
            )
        if self._is_full:
            raise Overloaded("the log is nearly full", retry_after_s=_RETRY_AFTER_S, reason="log_memory")
