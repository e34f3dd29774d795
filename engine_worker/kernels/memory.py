"""Memory for weights and KV cache: few large mappings in huge pages, which save a TLB miss for every 4 KiB read."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Final

import torch
from torch import Tensor

CHUNK_BYTES: Final = 64 << 20
HUGE_PAGE_BYTES: Final = 2 << 20
ALIGNMENT_BYTES: Final = 128


def map_bytes(num_bytes: int) -> Tensor:
    """Zeroed memory of its own, uint8 [num_bytes], in huge pages where the system has them."""
    area = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= HUGE_PAGE_BYTES:
        with contextlib.suppress(OSError):  # a kernel without huge pages: small ones do
            area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=torch.uint8)[:num_bytes]


class Arena:
    """Hands out tensors from large mappings; a mapping lives as long as one of its tensors."""

    def __init__(self, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, aligned to a cache line; its content is undefined."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes > self._chunk_bytes // 2:
            return map_bytes(num_bytes).view(dtype).view(shape)
        if self._used + num_bytes > len(self._chunk):
            self._chunk, self._used = map_bytes(self._chunk_bytes), 0
        piece = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return piece.view(dtype).view(shape)
