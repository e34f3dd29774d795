"""Admission stops before the server is full, so that what runs can finish."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from typing import Final

from common.errors import LogUnavailable, Overloaded
from common.transport.client import LogClient

_LIMIT: Final = 0.8  # of maxmemory
_LOOK_S: Final = 1.0
_STALE_S: Final = 2.0
_RETRY_AFTER_S: Final = 5.0


class MemoryWatch:
    """How full the primaries are. Where `run` keeps looking, no submission waits for the answer."""

    def __init__(self, client: LogClient) -> None:
        self._client = client
        self._looked_at = -math.inf
        self._is_full = False

    async def run(self) -> None:
        """Looks every second until cancelled."""
        while True:
            with contextlib.suppress(LogUnavailable):  # submissions find out themselves
                await self._look()
            await asyncio.sleep(_LOOK_S)

    async def refuse_when_full(self) -> None:
        """Raises `Overloaded` when a primary uses more than four fifths of its maxmemory, `LogUnavailable`."""
        if time.monotonic() - self._looked_at > _STALE_S:
            await self._look()
        if self._is_full:
            raise Overloaded("the log is nearly full", retry_after_s=_RETRY_AFTER_S, reason="log_memory")

    async def _look(self) -> None:
        self._looked_at = time.monotonic()  # first, so that the others do not look as well
        facts = await self._client.retrying(lambda: self._client.connections.on_primaries("INFO", "memory"))
        self._is_full = any(
            int(fact.get("used_memory", 0)) > _LIMIT * int(fact["maxmemory"])
            for fact in facts
            if int(fact.get("maxmemory", 0)) > 0
        )
