"""The life of one edge process: starting, ready, draining, listening no more; and when draining must be over."""

from __future__ import annotations

import asyncio
from enum import StrEnum


class Phase(StrEnum):
    """What the readiness probe shows."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class Lifecycle:
    """Owned by the event loop. Draining begins once and never ends."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.is_closed = False
        """No generation is begun any more."""
        self._is_deaf = asyncio.Event()
        self._must_end = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        return self.phase is Phase.DRAINING

    def ready(self) -> None:
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY

    def drain(self, within_s: float) -> None:
        """Readiness fails from now on; streams that still run after ``within_s`` are ended by `must_end`."""
        if self.is_draining:
            return
        self.phase = Phase.DRAINING
        asyncio.get_running_loop().call_later(within_s, self._must_end.set)

    def close(self) -> None:
        """Balancers have had their time to look elsewhere: what still comes is refused."""
        self.is_closed = True

    def stop_listening(self) -> None:
        """No connection is accepted any more: whoever is sent away comes to another edge."""
        self._is_deaf.set()

    async def listens_no_more(self) -> None:
        """Returns when readers that can go on elsewhere may be sent there."""
        await self._is_deaf.wait()

    async def must_end(self) -> None:
        """Returns when running streams have to be ended."""
        await self._must_end.wait()
