"""Which block holds the keys and values of which prefix.

A full block is named by a hash chained over everything before it: blake2b-128 of the parent's name and the block's
token ids (int32, little endian). The chain starts from the adapter and the cache salt, so requests that must not
share cannot even find each other's blocks. Names depend on nothing else: the same prefix has the same name in every
process and on every run.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

DIGEST_SIZE: Final = 16


def root_hash(adapter: str, cache_salt: str) -> bytes:
    """The parent of a sequence's first block."""
    # Lengths in front, so that no two pairs give the same bytes.
    parts = (adapter.encode(), cache_salt.encode())
    return blake2b(b"".join(len(part).to_bytes(4, "little") + part for part in parts), digest_size=DIGEST_SIZE).digest()


def extend_hashes(hashes: list[bytes], root: bytes, tokens: npt.NDArray[np.int32], block_size: int, upto: int) -> None:
    """Append to ``hashes`` the names of the full blocks of ``tokens[:upto]`` that it does not hold yet."""
    parent = hashes[-1] if hashes else root
    for index in range(len(hashes), upto // block_size):
        block = tokens[index * block_size : (index + 1) * block_size].astype("<i4", copy=False)
        parent = blake2b(parent + block.tobytes(), digest_size=DIGEST_SIZE).digest()
        hashes.append(parent)


class PrefixCache:
    """A two-way map between names and blocks: one block a name, one name a block."""

    def __init__(self) -> None:
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_by_hash)

    def match(self, hashes: list[bytes], limit: int) -> list[int]:
        """Blocks of the longest cached prefix of ``hashes[:limit]``, which may be empty."""
        found = []
        for name in hashes[:limit]:
            block = self._block_by_hash.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def insert(self, name: bytes, block: int) -> None:
        """Remember ``block`` under ``name``, unless another block already holds the same content."""
        if name not in self._block_by_hash:
            self._block_by_hash[name] = block
            self._hash_by_block[block] = name

    def forget(self, block: int) -> None:
        """The block's content is about to be overwritten."""
        del self._block_by_hash[self._hash_by_block.pop(block)]

    def holds(self, block: int) -> bool:
        return block in self._hash_by_block

    def check_integrity(self) -> None:
        """Raises AssertionError unless the two maps mirror each other."""
        mirrored = {block: name for name, block in self._block_by_hash.items()}
        assert mirrored == self._hash_by_block, "names and blocks disagree"
