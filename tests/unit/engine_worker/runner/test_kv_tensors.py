"""The size of the KV cache: from memory to blocks, and nonsense refused with a way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.errors import ConfigError, NotEnoughMemory
from engine_worker.config import KvCacheSettings
from engine_worker.kernels.kv_quantization import KvFormat
from engine_worker.kernels.ops_torch import TorchOps
from engine_worker.models.config import parse_config
from engine_worker.runner.kv_tensors import allocate_kv, plan_kv_cache

CONFIG = parse_config(
    {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    }
)
OPS = TorchOps(torch.float32)
FORMATS: tuple[KvFormat, ...] = ("activations", "int8")
TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head size, fp32


def _plan(available: int, max_model_len: int = 256, **settings: Any) -> Any:
    return plan_kv_cache(KvCacheSettings(**settings), OPS, CONFIG, max_model_len, available)


def test_a_share_of_what_is_free() -> None:
    plan = _plan(TOKEN_BYTES * 4096, kv_cache_memory_fraction=0.5)
    assert (plan.num_blocks, plan.num_tokens, plan.full_length_requests) == (64, 2048, 8.0)
    assert plan.num_bytes == TOKEN_BYTES * 2048
    assert str(plan) == "1 MiB for 2,048 tokens in 64 blocks of 32: 8.0 requests of 256 tokens at a time"


def test_bytes_asked_for() -> None:
    assert _plan(1 << 30, kv_cache_memory_bytes=TOKEN_BYTES * 320 + 5).num_blocks == 10


def test_int8_takes_a_byte_a_value_and_a_scale_a_token_and_head() -> None:
    settings = KvCacheSettings(kv_cache_memory_bytes=1 << 20)
    plain, small = (
        plan_kv_cache(settings, TorchOps(torch.bfloat16, kv_format=kv_format), CONFIG, 256, 1 << 30)
        for kv_format in FORMATS
    )
    assert (plain.num_tokens, small.num_tokens) == ((1 << 20) // 256, (1 << 20) // (144 * 32) * 32)
    assert small.full_length_requests > 1.7 * plain.full_length_requests  # heads of 16: with 64 it is 1.9


def test_more_than_there_is() -> None:
    with pytest.raises(NotEnoughMemory, match="asks for 2 GiB, but only 1 GiB"):
        _plan(1 << 30, kv_cache_memory_bytes=2 << 30)


def test_not_one_request_fits() -> None:
    with pytest.raises(NotEnoughMemory, match=r"holds 224 tokens.*max_model_len = 256.*lower max_model_len"):
        _plan(TOKEN_BYTES * 500, kv_cache_memory_fraction=0.5)


def test_a_block_size_that_the_kernels_cannot_serve() -> None:
    class Picky(TorchOps):
        def kv_bytes_per_block(self, *shape: int) -> int:
            raise ValueError("multiples of 32 only")

    with pytest.raises(ConfigError, match=r"block_size 24.*multiples of 32") as raised:
        plan_kv_cache(KvCacheSettings(block_size=24), Picky(torch.float32), CONFIG, 256, 1 << 30)
    assert raised.value.param == "block_size"


def test_the_free_memory_of_this_machine_is_asked_for() -> None:
    assert plan_kv_cache(KvCacheSettings(kv_cache_memory_fraction=0.001), OPS, CONFIG, 256).num_blocks >= 8


def test_the_tensors_are_as_large_as_planned() -> None:
    plan = _plan(TOKEN_BYTES * 1024)
    cache = allocate_kv(plan, OPS, CONFIG)
    assert (cache.num_blocks, cache.block_size) == (plan.num_blocks, plan.block_size)
