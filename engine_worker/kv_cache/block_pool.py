"""Physical blocks: who is free, who is referenced how often, and which free blocks still hold something useful."""

from __future__ import annotations

from collections.abc import Callable, Iterable


class BlockPool:
    """Block ids 0 .. num_blocks - 1. Each is in exactly one of three states::

        free         nothing of use in it; taken first, most recently freed first (its memory is warm)
        cached free  nobody references it, but its content can be found by a prefix; taken oldest first
        referenced   ref_counts[block] > 0 sequences hold it

    ``on_evict`` is called with a cached free block the moment it is taken for something else.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._on_evict = on_evict
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is taken first
        self._cached_free: dict[int, None] = {}  # insertion order is age, oldest first

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + len(self._cached_free)

    @property
    def num_cached_free(self) -> int:
        return len(self._cached_free)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each. The caller has checked `num_available`."""
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block = next(iter(self._cached_free))
                del self._cached_free[block]
                self._on_evict(block)
            self.ref_counts[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each of ``blocks``, which are referenced or cached free."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._cached_free[block]
            self.ref_counts[block] += 1

    def release(self, block: int, *, is_cached: bool) -> None:
        """One reference less; the last one leaves the block cached free or free."""
        self.ref_counts[block] -= 1
        if self.ref_counts[block] > 0:
            return
        if is_cached:
            self._cached_free[block] = None
        else:
            self._free.append(block)

    def is_cached_free(self, block: int) -> bool:
        return block in self._cached_free

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is in exactly one state."""
        referenced = [block for block, count in enumerate(self.ref_counts) if count > 0]
        assert min(self.ref_counts, default=0) >= 0, "negative reference count"
        everything = sorted([*self._free, *self._cached_free, *referenced])
        assert everything == list(range(self.num_blocks)), "a block is lost or accounted for twice"
