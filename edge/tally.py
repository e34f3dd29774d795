"""Bytes that one edge process holds for one caller: request bodies, and events that slow readers have not taken yet."""

from __future__ import annotations


class Tally:
    """What is held, and how much may be. Used from the event loop only."""

    __slots__ = ("held", "limit")

    def __init__(self, limit: int = 0) -> None:
        """``limit`` in bytes; 0 = none."""
        self.held = 0
        self.limit = limit

    def take(self, size: int) -> bool:
        """Counts ``size`` bytes more; False, and nothing is counted, when that is too much."""
        if self.limit and self.held + size > self.limit:
            return False
        self.held += size
        return True

    def give(self, size: int) -> None:
        """So many bytes are not held any more."""
        self.held -= size
