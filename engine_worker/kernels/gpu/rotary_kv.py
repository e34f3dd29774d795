"""Rotary position embedding (Su et al., 2021) of Q and K in place, and the write of K and V into the paged cache.

One program a token and head. The per-head RMSNorm of Qwen3 comes before the rotation where weights are given.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine_worker.kernels.ops import AttentionMetadata, AttentionShape


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, offsets, mask, head, num_query_heads):
    is_query = (offsets * 0 + head) < num_query_heads
    q_weight = tl.load(q_norm_ptr + offsets, mask=mask & is_query, other=0.0)
    k_weight = tl.load(k_norm_ptr + offsets, mask=mask & ~is_query, other=0.0)
    return q_weight + k_weight


@triton.jit
def _rotary_kv(
    # pointers
    qkv_ptr,  # [T, (H + 2 KH) * HD], changed in place
    cos_sin_ptr,  # fp32 [max_positions, ROTARY]: cos | sin
    positions_ptr,
    slots_ptr,
    key_cache_ptr,  # [num_slots, KH, HD]
    value_cache_ptr,
    q_norm_ptr,
    k_norm_ptr,
    # sizes
    norm_eps,
    # meta-parameters
    H: tl.constexpr,
    KH: tl.constexpr,
    HD: tl.constexpr,
    ROTARY: tl.constexpr,
    HALF_PAD: tl.constexpr,  # ROTARY / 2 rounded up to a power of two
    REST_PAD: tl.constexpr,  # HD - ROTARY likewise, at least 1
    HD_PAD: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = ROTARY // 2
    base = qkv_ptr + (token * (H + 2 * KH) + head) * HD
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if head >= H + KH:
        d = tl.arange(0, HD_PAD)
        value = tl.load(base + d, mask=d < HD)
        tl.store(value_cache_ptr + (slot * KH + head - H - KH) * HD + d, value, mask=d < HD)
        return
    # The two halves and the unrotated rest are separate vectors, so that no lane reads what another one writes.
    i = tl.arange(0, HALF_PAD)
    j = ROTARY + tl.arange(0, REST_PAD)
    half_mask, rest_mask = i < HALF, j < HD
    low = tl.load(base + i, mask=half_mask, other=0.0).to(tl.float32)
    high = tl.load(base + HALF + i, mask=half_mask, other=0.0).to(tl.float32)
    rest = tl.load(base + j, mask=rest_mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        total = tl.sum(low * low, 0) + tl.sum(high * high, 0) + tl.sum(rest * rest, 0)
        scale = 1.0 / tl.sqrt(total / HD + norm_eps)
        low = low * scale * _norm_weight(q_norm_ptr, k_norm_ptr, i, half_mask, head, H)
        high = high * scale * _norm_weight(q_norm_ptr, k_norm_ptr, HALF + i, half_mask, head, H)
        rest = rest * scale * _norm_weight(q_norm_ptr, k_norm_ptr, j, rest_mask, head, H)
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * ROTARY + i, mask=half_mask, other=0.0)
    sin = tl.load(cos_sin_ptr + position * ROTARY + HALF + i, mask=half_mask, other=0.0)
    dtype = qkv_ptr.dtype.element_ty
    new_low = (low * cos - high * sin).to(dtype)
    new_high = (high * cos + low * sin).to(dtype)
    new_rest = rest.to(dtype)
    tl.store(base + i, new_low, mask=half_mask)
    tl.store(base + HALF + i, new_high, mask=half_mask)
    tl.store(base + j, new_rest, mask=rest_mask)
    if head >= H:
        key = key_cache_ptr + (slot * KH + head - H) * HD
        tl.store(key + i, new_low, mask=half_mask)
        tl.store(key + HALF + i, new_high, mask=half_mask)
        tl.store(key + j, new_rest, mask=rest_mask)


def rotary_kv(
    qkv: Tensor,
    cos_sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    meta: AttentionMetadata,
    shape: AttentionShape,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
) -> None:
    """See `Ops.rope_write_kv`. Caches: [num_blocks, block_size, KH, HD] of qkv's dtype."""
    tokens = qkv.shape[0]
    if not tokens:
        return
    rotary = cos_sin.shape[1]
    has_norm = q_norm is not None and k_norm is not None
    _rotary_kv[(tokens, shape.num_heads + 2 * shape.num_kv_heads)](
        qkv,
        cos_sin,
        meta.positions,
        meta.slot_mapping,
        key_cache,
        value_cache,
        q_norm if has_norm else cos_sin,  # never read without the norm; a pointer is needed all the same
        k_norm if has_norm else cos_sin,
        norm_eps,
        H=shape.num_heads,
        KH=shape.num_kv_heads,
        HD=shape.head_size,
        ROTARY=rotary,
        HALF_PAD=triton.next_power_of_2(rotary // 2),
        REST_PAD=triton.next_power_of_2(max(1, shape.head_size - rotary)),
        HD_PAD=triton.next_power_of_2(shape.head_size),
        HAS_NORM=has_norm,
    )
