"""Every live sequence and where it stands: waiting, or running with a seat and blocks. Nobody else moves one."""

from __future__ import annotations

import bisect
from collections import Counter

from engine_worker.kv_cache.manager import KvCacheManager
from engine_worker.scheduler.policy import FairShare, WaitingQueue, rank_of
from engine_worker.scheduler.stopping import Ending
from engine_worker.sequence import Sequence, SequenceStatus


class Roster:
    """``running`` is kept by rank, best first; ``waiting`` in the order of the policy. Both are for reading only."""

    def __init__(self, kv_cache: KvCacheManager, fair_share: FairShare) -> None:
        self.waiting = WaitingQueue(fair_share)
        self.running: list[Sequence] = []
        self._kv_cache = kv_cache
        self._fair_share = fair_share
        self._by_request: dict[str, dict[int, Sequence]] = {}
        self._live_by_tenant: Counter[str] = Counter()

    def enter(self, sequence: Sequence) -> None:
        """A new sequence waits."""
        tenant = sequence.tenant
        if tenant not in self._live_by_tenant:
            self._fair_share.welcome(tenant, set(self._live_by_tenant))
        self._live_by_tenant[tenant] += 1
        self._by_request.setdefault(sequence.request_id, {})[sequence.seq_id] = sequence
        self.waiting.push(sequence)

    def start(self, reserve: int) -> bool:
        """The first of the waiting runs. False, with nothing changed, when too few blocks are free (see `admit`)."""
        sequence = self.waiting.peek()
        assert sequence is not None, "nobody is waiting"
        if not self._kv_cache.admit(sequence, reserve):
            return False
        self.waiting.pop()
        sequence.status = SequenceStatus.RUNNING
        bisect.insort(self.running, sequence, key=rank_of)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """A running sequence waits again, without its blocks."""
        self.running.remove(sequence)
        self._kv_cache.free(sequence)
        sequence.num_computed_tokens = 0
        sequence.num_preemptions += 1
        sequence.status = SequenceStatus.WAITING
        self.waiting.push(sequence)

    def end(self, sequence: Sequence, ending: Ending | None) -> None:
        """Let go of a live sequence; no ending = it failed."""
        was_running = sequence.status is SequenceStatus.RUNNING
        sequence.status = SequenceStatus.FINISHED
        if ending is not None:
            sequence.finish_reason, sequence.stop_reason = ending.reason, ending.stop_reason
        if was_running:
            self.running.remove(sequence)
            self._kv_cache.free(sequence)
        else:
            self.waiting.discard(sequence)
        group = self._by_request[sequence.request_id]
        del group[sequence.seq_id]
        if not group:
            del self._by_request[sequence.request_id]
        self._live_by_tenant[sequence.tenant] -= 1
        if not self._live_by_tenant[sequence.tenant]:
            del self._live_by_tenant[sequence.tenant]

    def of_request(self, request_id: str) -> tuple[Sequence, ...]:
        return tuple(self._by_request.get(request_id, {}).values())

    def holds(self, sequence: Sequence) -> bool:
        """Whether this very sequence is live here."""
        return self._by_request.get(sequence.request_id, {}).get(sequence.seq_id) is sequence

    def check_integrity(self) -> None:
        """Raises AssertionError when a sequence is lost, held twice, or holds what it should not."""
        assert self.running == sorted(self.running, key=rank_of), "running sequences out of order"
        for sequence in self.running:
            assert sequence.status is SequenceStatus.RUNNING, sequence
            assert sequence.block_table_row is not None, f"{sequence} runs without blocks"
        waiting = list(self.waiting)
        assert len(waiting) == len(self.waiting), "the waiting queue has lost count"
        assert all(sequence.block_table_row is None for sequence in waiting), "a waiting sequence holds blocks"
        known = sorted(seq_id for group in self._by_request.values() for seq_id in group)
        here = sorted(sequence.seq_id for sequence in [*self.running, *waiting])
        assert known == here, "a sequence is lost or held twice"
        assert self._live_by_tenant.total() == len(here), "tenants' sequences are miscounted"
        if not self.running:
            assert self._kv_cache.usage().used == 0, "blocks leaked"
