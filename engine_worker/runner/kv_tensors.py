"""How large the KV cache is: from settings and free memory to a number of blocks."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigError, NotEnoughMemory
from engine_worker.config import KvCacheSettings
from engine_worker.kernels.ops import KvCache, Ops
from engine_worker.models.registry import ModelShape
from engine_worker.weights.memory import available_bytes as memory_now
from engine_worker.weights.memory import human


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

    def __str__(self) -> str:
        return (
            f"{human(self.num_bytes)} for {self.num_tokens:,} tokens in {self.num_blocks:,} blocks of "
            f"{self.block_size}: {self.full_length_requests:.1f} requests of {self.max_model_len:,} tokens at a time"
        )


def plan_kv_cache(
    settings: KvCacheSettings, ops: Ops, config: ModelShape, max_model_len: int, available_bytes: int | None = None
) -> KvCachePlan:
    """Blocks for ``settings``; ``available_bytes`` = memory free now (None: ask the machine).

    Raises `NotEnoughMemory` when not even one request of ``max_model_len`` tokens fits, or when more is asked for than
    there is; `ConfigError` for a block size that the kernels cannot serve.
    """
    block_size = settings.block_size
    try:
        per_block = ops.kv_bytes_per_block(config.num_layers, block_size, config.num_kv_heads, config.head_size)
    except ValueError as error:
        raise ConfigError(f"block_size {block_size} cannot be used: {error}", param="block_size") from error
    available = memory_now() if available_bytes is None else available_bytes
    asked = settings.kv_cache_memory_bytes
    if asked > available:
        raise NotEnoughMemory(
            f"kv_cache_memory_bytes asks for {human(asked)}, but only {human(available)} of memory are free",
            param="kv_cache_memory_bytes",
        )
    budget = asked or int(available * settings.kv_cache_memory_fraction)
    num_blocks = budget // per_block
    needed = -(-max_model_len // block_size)
    if num_blocks < needed:
        raise NotEnoughMemory(
            f"a KV cache of {human(budget)} holds {num_blocks * block_size:,} tokens, but one request may have "
            f"max_model_len = {max_model_len:,}, which takes {human(needed * per_block)}: lower max_model_len, or "
            f"raise kv_cache_memory_bytes (or kv_cache_memory_fraction)",
            param="max_model_len",
        )
    return KvCachePlan(num_blocks, block_size, num_blocks * per_block, num_blocks * block_size, max_model_len)


def allocate_kv(plan: KvCachePlan, ops: Ops, config: ModelShape, spare_blocks: int = 0) -> KvCache:
    """The tensors of ``plan``, with some blocks behind those that it counts.

    The machine gives the memory as it is first written to.
    """
    num_blocks = plan.num_blocks + spare_blocks
    return ops.allocate_kv(config.num_layers, num_blocks, plan.block_size, config.num_kv_heads, config.head_size)
