"""What workers do with requests: claim, own, append, take over, hand over."""

from __future__ import annotations

from collections.abc import Sequence

from common.events import InboxEvent
from common.transport.client import LogClient
from common.transport.leases import Lease
from common.transport.records import AppendItem, AppendOutcome, Owned


class Ownership:
    """The requests of one worker and one model. All methods belong to one event loop.

    It remembers which requests it holds and under which epoch, so that nothing pending is overlooked or owned twice.
    """

    def __init__(self, client: LogClient, *, model: str, lease: Lease, max_attempts: int = 3) -> None:
        self._client = client

    async def ensure_groups(self) -> None:
        """Create the consumer groups. To be called once at start; repeated by itself when they vanish."""

    async def claim(self, limit: int, block_ms: int = 0) -> list[Owned]:
        """Take up to ``limit`` requests and own them; wait up to ``block_ms`` when there is none.

        After a reconnection, and every few seconds anyway, it also rechecks its history, so it may return requests
        with ``limit`` 0, and again a request that the worker believes to run (under a new epoch: replace it).
        Returns nothing while the lease is not held. A request that cannot be decoded is failed in the log, not raised.

        Raises `LogUnavailable`.
        """
        raise NotImplementedError

    async def recheck_history(self) -> list[Owned]:
        """Own what is pending with this worker but not held by it (the reply that named it was lost)."""
        raise NotImplementedError

    async def takeover_scan(self, limit: int) -> list[Owned]:
        """Take up to ``limit`` requests from workers whose leases are gone. Call it every half lease.

        A lease counts as gone when it was seen absent twice, half a lease apart, without a failure in between.
        """
        raise NotImplementedError

    async def append(self, items: Sequence[AppendItem]) -> list[AppendOutcome]:
        """Append what one engine step produced, then push frames to the edges that read these requests.

        Answers in the order of ``items``. Safe to repeat with the same items, which is what to do after
        `LogUnavailable` (any part may have been appended).
        """
        raise NotImplementedError

    async def release(self, request_id: str) -> bool:
        """Hand a request back, in front of the queue, for another worker. False when it was not ours any more."""
        raise NotImplementedError

    async def read_inbox(self, block_ms: int = 0) -> list[InboxEvent]:
        """New cancellations and drains, waiting up to ``block_ms`` for the first."""
        raise NotImplementedError

    @property
    def held(self) -> dict[str, int]:
        """Request id to epoch of everything owned and not yet ended, fenced or released."""
        raise NotImplementedError
