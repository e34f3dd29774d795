"""The scheduler's view of the KV cache: which sequence holds which blocks. Integers only; tensors are elsewhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine_worker.kv_cache.block_pool import BlockPool
from engine_worker.kv_cache.prefix_cache import PrefixCache, extend_hashes, root_hash
from engine_worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class KvCacheUsage:
    """Blocks now, and tokens looked up in the prefix cache since the start."""

    total: int
    used: int  # referenced by at least one sequence
    cached: int  # free, but findable by their prefix
    queries: int  # tokens that admissions looked up
    hits: int  # of them, found


class KvCacheManager:
    """Block tables, prefix cache and block pool of one worker. Owned by the engine thread (`prepare` excepted).

    ``block_tables``: int32 [max_num_seqs, max_blocks_per_seq]; row ``sequence.block_table_row`` holds the physical
    block ids of a sequence that has blocks, entries beyond ``sequence.num_blocks`` are meaningless. The array is
    allocated once and only ever changed in place: runners keep a view of it.

    A sequence is admitted with blocks for all its known tokens, then grows by a block at a time. Only full blocks
    are shared and a sequence never computes into a block it shares, so nothing is ever copied.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.has_prefix_cache = enable_prefix_caching
        self.block_tables: npt.NDArray[np.int32] = np.zeros(
            (max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32
        )
        self._prefix_cache = PrefixCache()
        self._pool = BlockPool(num_blocks, on_evict=self._prefix_cache.forget)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._holders: dict[int, Sequence] = {}  # by row
        self._num_committed: dict[int, int] = {}  # by row: leading blocks known to the prefix cache
        self._queries = 0
        self._hits = 0

    def prepare(self, sequence: Sequence) -> None:
        """Hash the full blocks of a new sequence, so that the step loop need not.

        Touches nothing but the sequence: call it on any thread, before the engine is given the sequence. Calling it
        again does nothing.
        """
        if self.has_prefix_cache:
            self._extend_hashes(sequence, sequence.num_tokens)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a sequence of ``num_tokens`` tokens fits when it has the whole cache to itself."""
        needed = self._blocks_for(num_tokens)
        return needed <= self.num_blocks and needed <= self.block_tables.shape[1]

    def shareable_prefix(self, sequence: Sequence) -> bytes | None:
        """Name of the longest prefix of the prompt that another sequence with the same prompt could take over.

        None when there is no such prefix, or when ``sequence`` itself would not read it.
        """
        count = (sequence.num_prompt_tokens - 1) // self.block_size
        if not self.has_prefix_cache or count < 1 or sequence.scores_prompt:
            return None
        self.prepare(sequence)
        return sequence.block_hashes[count - 1]

    def num_cached_tokens(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that its admission would find in the prefix cache."""
        return len(self._match_prefix(sequence)) * self.block_size

    def admit(self, sequence: Sequence, reserve: int = 0) -> bool:
        """Give a sequence a row and blocks for all its known tokens, the cached prefix among them.

        Sets ``num_computed_tokens`` to the cached prefix, which always leaves at least one token to compute. False,
        with nothing changed, when no row is free or fewer than ``reserve`` blocks would stay available.
        """
        if not self._free_rows:
            return False
        matched = self._match_prefix(sequence)
        needed = self._blocks_for(sequence.num_tokens) - len(matched)
        revived = sum(map(self._pool.is_cached_free, matched))
        if needed + revived + reserve > self._pool.num_available:
            return False
        self._pool.share(matched)
        row = self._free_rows.pop()
        sequence.block_table_row = row
        sequence.num_blocks = 0
        self._holders[row] = sequence
        self._num_committed[row] = len(matched)
        self._append_blocks(sequence, matched + self._pool.allocate(needed))
        sequence.num_computed_tokens = len(matched) * self.block_size
        if self.has_prefix_cache:
            self._queries += sequence.num_tokens
            self._hits += sequence.num_computed_tokens
        return True

    def grow(self, sequence: Sequence) -> bool:
        """Make sure that the last known token has a slot. False, with nothing changed, when no block is available."""
        if sequence.num_tokens <= sequence.num_blocks * self.block_size:
            return True
        if self._pool.num_available == 0:
            return False
        self._append_blocks(sequence, self._pool.allocate(1))
        return True

    def commit(self, sequence: Sequence) -> None:
        """Let others find the blocks that ``num_computed_tokens`` has filled, of prompt and output alike."""
        row = sequence.block_table_row
        if row is None or not self.has_prefix_cache:
            return
        num_full = sequence.num_computed_tokens // self.block_size
        first = self._num_committed[row]
        if num_full <= first:
            return
        self._extend_hashes(sequence, num_full * self.block_size)
        for index in range(first, num_full):
            self._prefix_cache.insert(sequence.block_hashes[index], int(self.block_tables[row, index]))
        self._num_committed[row] = num_full

    def free(self, sequence: Sequence) -> None:
        """Take back a sequence's row and blocks; their cached content stays findable. No-op without blocks."""
        row = sequence.block_table_row
        if row is None:
            return
        # The end of a prefix is worth less than its beginning, so it is released, and later evicted, first.
        for block in reversed(self.block_tables[row, : sequence.num_blocks].tolist()):
            self._pool.release(block, is_cached=self._prefix_cache.holds(block))
        del self._holders[row], self._num_committed[row]
        self._free_rows.append(row)
        sequence.block_table_row = None
        sequence.num_blocks = 0

    def usage(self) -> KvCacheUsage:
        """Cheap: counters only."""
        return KvCacheUsage(
            total=self.num_blocks,
            used=self.num_blocks - self._pool.num_available,
            cached=self._pool.num_cached_free,
            queries=self._queries,
            hits=self._hits,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is accounted for once and references equal table entries.

        With no sequence holding blocks this means: zero leaks.
        """
        self._pool.check_integrity()
        self._prefix_cache.check_integrity()
        in_tables: Counter[int] = Counter()
        for row, sequence in self._holders.items():
            assert sequence.block_table_row == row, f"{sequence} does not know its row {row}"
            assert sequence.num_computed_tokens <= sequence.num_blocks * self.block_size, f"{sequence} lacks blocks"
            blocks = self.block_tables[row, : sequence.num_blocks].tolist()
            assert len(set(blocks)) == len(blocks), f"{sequence} holds a block twice"
            in_tables.update(blocks)
        counts = {block: count for block, count in enumerate(self._pool.ref_counts) if count}
        assert counts == dict(in_tables), "reference counts differ from the block tables"
        rows = sorted([*self._free_rows, *self._holders])
        assert rows == list(range(self.max_num_seqs)), "a row is lost or accounted for twice"
        for block in range(self.num_blocks):
            assert not self._pool.is_cached_free(block) or self._prefix_cache.holds(block), "cached block has no name"

    def _match_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks that ``sequence`` may start from: never all of its tokens, and no prompt token unscored."""
        if not self.has_prefix_cache:
            return []
        self.prepare(sequence)
        last = sequence.num_scored_tokens if sequence.scores_prompt else sequence.num_tokens
        return self._prefix_cache.match(sequence.block_hashes, max(0, last - 1) // self.block_size)

    def _append_blocks(self, sequence: Sequence, blocks: list[int]) -> None:
        first = sequence.num_blocks
        self.block_tables[sequence.block_table_row, first : first + len(blocks)] = blocks
        sequence.num_blocks = first + len(blocks)

    def _extend_hashes(self, sequence: Sequence, upto: int) -> None:
        if len(sequence.block_hashes) < upto // self.block_size:
            root = root_hash(sequence.adapter, sequence.cache_salt)
            extend_hashes(sequence.block_hashes, root, sequence.tokens, self.block_size, upto)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
