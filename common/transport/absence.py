"""When an absent lease means a dead worker."""

from __future__ import annotations

from collections.abc import Hashable, Set
from typing import Generic, TypeVar

_T = TypeVar("_T", bound=Hashable)


class AbsenceWatch(Generic[_T]):
    """The two-look rule: absent now, and absent at a look at least ``patience_s`` ago, and at all looks between.

    After an outage of the server every lease is gone until its holder has renewed it; one look would make every
    worker take over from every other.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since: dict[_T, float] = {}

    def look(self, absent: Set[_T], now: float) -> list[_T]:
        """What has been absent long enough, given what is absent now (``now`` from a monotonic clock)."""
        self._since = {name: self._since.get(name, now) for name in absent}
        return [name for name, since in self._since.items() if now - since >= self._patience_s]

    def forget(self) -> None:
        """A look failed: start again."""
        self._since.clear()
