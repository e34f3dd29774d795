"""Whose turn it is: priority class first, then the tenant that was served least for its weight, then arrival."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Final

from engine_worker.sequence import Sequence, SequenceStatus

MAX_TENANTS: Final = 4096  # remembered by FairShare; beyond it, idle ones are forgotten

Rank = tuple[int, float, int]


def rank_of(sequence: Sequence) -> Rank:
    """Order among the running: the smallest is served first, the largest is preempted first."""
    return (sequence.priority, sequence.arrival_s, sequence.seq_id)


class FairShare:
    """Tokens computed for each tenant, divided by its weight: the less a tenant got, the sooner it is served.

    A tenant that comes back after a pause starts level with the least served of the others: idling earns no credit.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}

    def charge(self, tenant: str, num_tokens: int, weight: float) -> None:
        """``num_tokens`` were scheduled for ``tenant``, which has this weight now."""
        self._served[tenant] = self._served.get(tenant, 0.0) + num_tokens / weight

    def served(self, tenant: str) -> float:
        return self._served.get(tenant, 0.0)

    def welcome(self, tenant: str, competitors: set[str]) -> None:
        """``tenant`` begins to want service; ``competitors`` want it already."""
        floor = min(map(self.served, competitors), default=0.0)
        self._served[tenant] = max(self.served(tenant), floor)
        if len(self._served) > MAX_TENANTS:
            self._served = {name: self.served(name) for name in competitors | {tenant}}


class WaitingQueue:
    """Sequences that wait for their (first or next) admission, in the order of the policy."""

    def __init__(self, fair_share: FairShare) -> None:
        self._fair_share = fair_share
        self._levels: dict[int, dict[str, list[tuple[Rank, Sequence]]]] = {}  # priority -> tenant -> heap
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Sequence]:
        """Every waiting sequence, in no particular order."""
        for tenants in self._levels.values():
            for heap in tenants.values():
                yield from (item for _, item in heap if item.status is SequenceStatus.WAITING)

    def push(self, sequence: Sequence) -> None:
        tenants = self._levels.setdefault(sequence.priority, {})
        heapq.heappush(tenants.setdefault(sequence.tenant, []), (rank_of(sequence), sequence))
        self._size += 1

    def discard(self, sequence: Sequence) -> None:
        """``sequence`` has finished while it waited. Its entry is skipped when its turn comes."""
        assert sequence.status is SequenceStatus.FINISHED, sequence
        self._size -= 1

    def peek(self) -> Sequence | None:
        """The sequence whose turn it is."""
        while self._levels:
            priority = min(self._levels)
            tenants = self._levels[priority]
            tenant = min(tenants, key=lambda name: (self._fair_share.served(name), tenants[name][0][0]))
            heap = tenants[tenant]
            if heap[0][1].status is SequenceStatus.WAITING:
                return heap[0][1]
            self._drop_head(priority, tenant)
        return None

    def pop(self) -> Sequence:
        """Take out what `peek` showed."""
        sequence = self.peek()
        assert sequence is not None, "pop from an empty queue"
        self._drop_head(sequence.priority, sequence.tenant)
        self._size -= 1
        return sequence

    def _drop_head(self, priority: int, tenant: str) -> None:
        tenants = self._levels[priority]
        heapq.heappop(tenants[tenant])
        if not tenants[tenant]:
            del tenants[tenant]
        if not tenants:
            del self._levels[priority]
