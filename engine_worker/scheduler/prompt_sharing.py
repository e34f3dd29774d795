"""Sequences with one prompt compute it once: the others wait until the first has put it into the prefix cache."""

from __future__ import annotations

from engine_worker.kv_cache.manager import KvCacheManager
from engine_worker.sequence import Sequence, SequenceStatus


class PromptSharing:
    """Running sequences whose prompt others may be waiting for: the n choices of a request, or equal requests.

    Should the first be cancelled or preempted on the way, the next one to be asked about takes its place.
    """

    def __init__(self, kv_cache: KvCacheManager) -> None:
        self._kv_cache = kv_cache
        self._leaders: dict[bytes, Sequence] = {}  # by the name of the prefix they compute

    def refresh(self) -> None:
        """Forget those that have computed their prompt or do not run any more. Call before a round of questions."""
        if self._leaders:
            self._leaders = {name: item for name, item in self._leaders.items() if self._is_on_its_way(item)}

    def started(self, sequence: Sequence) -> None:
        """``sequence`` has been admitted."""
        name = self._kv_cache.shareable_prefix(sequence)
        if name is not None and self._is_on_its_way(sequence):
            self._leaders.setdefault(name, sequence)

    def is_worth_waiting(self, sequence: Sequence) -> bool:
        """Whether a running sequence is computing the very prompt that ``sequence`` has."""
        return bool(self._leaders) and self._kv_cache.shareable_prefix(sequence) in self._leaders

    def _is_on_its_way(self, sequence: Sequence) -> bool:
        block_size = self._kv_cache.block_size
        shareable = (sequence.num_prompt_tokens - 1) // block_size * block_size
        return sequence.status is SequenceStatus.RUNNING and sequence.num_computed_tokens < shareable
