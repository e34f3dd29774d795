"""What one edge process carries at once: open requests, generations, and generations of one tenant."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from common.errors import Overloaded, TenantLimitReached
from edge.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edge.config import LimitSettings


class Occupancy:
    """Counts what is open and refuses what is over the limit. Used from the event loop only."""

    def __init__(self, settings: LimitSettings) -> None:
        self._settings = settings
        self._requests = 0
        self._generations = 0
        self._by_tenant: Counter[str] = Counter()
        self._tallies: dict[str, Tally] = {}

    @property
    def requests(self) -> int:
        return self._requests

    @property
    def generations(self) -> int:
        return self._generations

    def tally(self, tenant: str) -> Tally:
        """The bytes held for ``tenant``; the same object every time. There are as many as keys."""
        if tenant not in self._tallies:
            self._tallies[tenant] = Tally(self._settings.max_tenant_bytes)
        return self._tallies[tenant]

    @contextmanager
    def request(self) -> Iterator[None]:
        """Holds one place for an open HTTP request. Raises `Overloaded`."""
        if self._requests >= self._settings.max_connections:
            raise Overloaded(
                f"This server has {self._requests} requests open, which is its limit.",
                retry_after_s=1.0,
                reason="edge_connections",
            )
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    def take_generation(self, tenant: str) -> None:
        """Takes one place for a generation; give it back with `give_generation`.

        Raises `Overloaded`, or `TenantLimitReached` when it is this tenant's share that is used up.
        """
        if self._generations >= self._settings.max_streams:
            raise Overloaded(
                f"This server has {self._generations} generations in progress, which is its limit.",
                retry_after_s=2.0,
                reason="edge_streams",
            )
        bound = self._settings.max_streams_per_tenant
        if bound and self._by_tenant[tenant] >= bound:
            raise TenantLimitReached(
                f"You have {bound} generations in progress, which is the limit of one key.",
                retry_after_s=5.0,
                reason="tenant_streams",
            )
        self._generations += 1
        self._by_tenant[tenant] += 1

    def give_generation(self, tenant: str) -> None:
        """Gives a place back."""
        self._generations -= 1
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
