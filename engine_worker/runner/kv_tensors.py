"""How large the KV cache is."""

from __future__ import annotations

from dataclasses import dataclass

from engine_worker.config import KvCacheSettings
from engine_worker.kernels.ops import Ops
from engine_worker.models.config import DecoderConfig


@dataclass(frozen=True, slots=True)
class KvCachePlan:
    """Size of the cache, in blocks, and what that means for requests."""

    num_blocks: int
    block_size: int
    num_bytes: int
    num_tokens: int
    max_model_len: int

    @property
    def full_length_requests(self) -> float:
        """Requests of ``max_model_len`` tokens that fit at the same time."""
        return self.num_tokens / self.max_model_len


def plan_kv_cache(
    settings: KvCacheSettings, ops: Ops, config: DecoderConfig, max_model_len: int, available_bytes: int | None = None
) -> KvCachePlan:
    """Blocks for ``settings``; ``available_bytes`` = memory free now (None: ask the machine).

    Raises `NotEnoughMemory` when not even one request of ``max_model_len`` tokens fits.
    """
    raise NotImplementedError
