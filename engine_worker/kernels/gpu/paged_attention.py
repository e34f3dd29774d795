"""Causal attention over a paged KV cache: prefill chunks and decodes in one launch, grouped-query heads.

Online softmax after FlashAttention (Dao et al., 2022), split over the keys for long contexts with few programs as in
Flash-Decoding (Dao et al., 2023), paged as in PagedAttention (Kwon et al., 2023).

A program works on a tile of ``BLOCK_Q`` query tokens of one sequence and one KV head; its rows are (token, head of the
group). Keys are taken in chunks of fixed length counted from position 0. Each chunk has its own softmax and the
chunks' results are folded in order, whether one program walks through all of them or each chunk is a program of its
own: the split changes no arithmetic, so a token's result depends neither on the batch nor on how it was split.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_worker.kernels.gpu.launch import needs_upcast
from engine_worker.kernels.ops import AttentionMetadata, AttentionShape

CHUNK: Final = 512  # keys whose softmax is computed together
_MIN_ROWS: Final = 16  # tl.dot needs as many
_ENOUGH_PROGRAMS: Final = 256  # beyond this a GPU is busy without splitting the keys


@triton.jit
def _find_sequence(query_start_ptr, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence that a tile belongs to: its first tile is query_start // BLOCK_Q + its index, by bisection."""
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_start_ptr + middle) // BLOCK_Q + middle
        if first <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _attend_chunk(
    query,
    key_ptr,
    value_ptr,
    table_ptr,
    kv_head,
    position,
    first_key,
    end_key,
    scale,
    KH: tl.constexpr,
    HD: tl.constexpr,
    HD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Softmax over the keys first_key .. end_key - 1 (block-aligned start): unnormalised output, maximum, sum."""
    d = tl.arange(0, HD_PAD)
    offsets = tl.arange(0, BLOCK_SIZE)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    output = tl.zeros([ROWS, HD_PAD], tl.float32)
    for start in range(first_key, end_key, BLOCK_SIZE):
        block = tl.load(table_ptr + start // BLOCK_SIZE).to(tl.int64)
        at = ((block * BLOCK_SIZE + offsets) * KH + kv_head)[:, None] * HD + d[None, :]
        keys = tl.load(key_ptr + at, mask=d[None, :] < HD, other=0.0)
        values = tl.load(value_ptr + at, mask=d[None, :] < HD, other=0.0)
        if UPCAST:
            keys = keys.to(tl.float32)
            values = values.to(tl.float32)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if SOFT_CAP > 0:
            scores = SOFT_CAP * (2.0 * tl.sigmoid(2.0 * scores / SOFT_CAP) - 1.0)  # cap * tanh(x / cap)
        key_position = (start + offsets)[None, :]
        visible = key_position <= position[:, None]
        if WINDOW > 0:
            visible = visible & (key_position > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen no visible key yet keeps its maximum at -inf; subtract 0 there instead of -inf.
        finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weights = tl.exp(scores - finite[:, None])
        decay = tl.exp(maximum - finite)
        output = output * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        total = total * decay + tl.sum(weights, 1)
        maximum = new_maximum
    return output, maximum, total


@triton.jit
def _fold(output, maximum, total, chunk_output, chunk_maximum, chunk_total):
    """Join a further chunk's partial softmax to what came before."""
    new_maximum = tl.maximum(maximum, chunk_maximum)
    finite = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    old = tl.exp(maximum - finite)
    new = tl.exp(chunk_maximum - finite)
    return (
        output * old[:, None] + chunk_output * new[:, None],
        new_maximum,
        total * old + chunk_total * new,
    )


@triton.jit
def _paged_attention(
    # pointers
    qkv_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    partial_ptr,  # fp32 [T * H, num_chunks, HD + 2]: output | maximum | sum; used when SPLIT
    query_start_ptr,
    seq_lens_ptr,
    rows_ptr,
    block_tables_ptr,
    # sizes
    num_seqs,
    num_chunks,
    scale,
    # strides
    qkv_stride,
    table_stride,
    # meta-parameters
    H: tl.constexpr,
    KH: tl.constexpr,
    HD: tl.constexpr,
    HD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    GROUP: tl.constexpr = H // KH
    sequence = _find_sequence(query_start_ptr, tile, num_seqs, BLOCK_Q)
    first_token = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - first_token
    first_query = (tile - first_token // BLOCK_Q - sequence) * BLOCK_Q
    if first_query >= num_queries:
        return  # the grid has one tile too many for sequences whose length is no multiple of BLOCK_Q
    seq_len = tl.load(seq_lens_ptr + sequence)
    table_ptr = block_tables_ptr + tl.load(rows_ptr + sequence).to(tl.int64) * table_stride

    r = tl.arange(0, ROWS)
    d = tl.arange(0, HD_PAD)
    query_index = first_query + r // GROUP
    valid = (r < BLOCK_Q * GROUP) & (query_index < num_queries)
    head = kv_head * GROUP + r % GROUP
    token = (first_token + query_index).to(tl.int64)
    position = tl.where(valid, seq_len - num_queries + query_index, -1)
    mask = valid[:, None] & (d[None, :] < HD)
    query = tl.load(qkv_ptr + (token * qkv_stride + head * HD)[:, None] + d[None, :], mask=mask, other=0.0)
    if UPCAST:
        query = query.to(tl.float32)

    end = tl.minimum(seq_len - num_queries + first_query + BLOCK_Q, seq_len)
    begin = 0
    if WINDOW > 0:
        oldest = tl.maximum(seq_len - num_queries + first_query - WINDOW + 1, 0)
        begin = oldest // CHUNK  # chunks before it hold no visible key for any row of the tile
    if SPLIT:
        chunk = tl.program_id(2)
        first_key = chunk * CHUNK
        if (first_key < end) & (chunk >= begin):
            output, maximum, total = _attend_chunk(
                query, key_ptr, value_ptr, table_ptr, kv_head, position, first_key,
                tl.minimum(first_key + CHUNK, end), scale,
                KH, HD, HD_PAD, BLOCK_SIZE, ROWS, WINDOW, SOFT_CAP, UPCAST,
            )  # fmt: skip
            at = partial_ptr + ((token * H + head) * num_chunks + chunk) * (HD + 2)
            tl.store(at[:, None] + d[None, :], output, mask=mask)
            tl.store(at + HD, maximum, mask=valid)
            tl.store(at + HD + 1, total, mask=valid)
    else:
        output = tl.zeros([ROWS, HD_PAD], tl.float32)
        maximum = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        for first_key in range(begin * CHUNK, end, CHUNK):
            chunk_output, chunk_maximum, chunk_total = _attend_chunk(
                query, key_ptr, value_ptr, table_ptr, kv_head, position, first_key,
                tl.minimum(first_key + CHUNK, end), scale,
                KH, HD, HD_PAD, BLOCK_SIZE, ROWS, WINDOW, SOFT_CAP, UPCAST,
            )  # fmt: skip
            output, maximum, total = _fold(output, maximum, total, chunk_output, chunk_maximum, chunk_total)
        result = output / tl.where(total > 0, total, 1.0)[:, None]  # rows of no token have seen nothing
        out = out_ptr + (token * H + head)[:, None] * HD + d[None, :]
        tl.store(out, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _fold_chunks(
    # pointers
    out_ptr,
    partial_ptr,
    # sizes
    num_chunks,
    # meta-parameters
    HD: tl.constexpr,
    HD_PAD: tl.constexpr,
):
    """One program a (token, head): the chunks' partial results in order. Chunks that nobody wrote have maximum -inf."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HD_PAD)
    mask = (d < HD)[None, :]
    output = tl.zeros([1, HD_PAD], tl.float32)
    maximum = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    one = tl.arange(0, 1)
    for chunk in range(num_chunks):
        at = partial_ptr + (row * num_chunks + chunk) * (HD + 2)
        chunk_output = tl.load(at + d[None, :], mask=mask, other=0.0)
        chunk_maximum = tl.load(at + HD + one)
        chunk_total = tl.load(at + HD + 1 + one)
        if tl.sum(chunk_total, 0) > 0:
            output, maximum, total = _fold(output, maximum, total, chunk_output, chunk_maximum, chunk_total)
    tl.store(out_ptr + row * HD + d[None, :], (output / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def paged_attention(
    qkv: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    meta: AttentionMetadata,
    shape: AttentionShape,
    *,
    split: bool | None = None,
) -> Tensor:
    """[T, (H + 2 KH) * HD] -> [T, H * HD]; caches [num_blocks, block_size, KH, HD] (block_size a power of two >= 16).

    ``split``: whether each chunk of keys is a program of its own; None = when there are too few programs otherwise.
    """
    tokens = qkv.shape[0]
    heads, kv_heads, head_size = shape.num_heads, shape.num_kv_heads, shape.head_size
    out = torch.empty(tokens, heads * head_size, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return out
    group = heads // kv_heads
    block_q = max(1, _MIN_ROWS // group)
    num_seqs = meta.seq_lens.shape[0]
    num_tiles = tokens // block_q + num_seqs
    num_chunks = triton.cdiv(meta.max_seq_len, CHUNK)
    if split is None:
        split = num_chunks > 1 and meta.max_query_len == 1 and num_tiles * kv_heads < _ENOUGH_PROGRAMS
    partial = torch.zeros(
        (tokens * heads, num_chunks, head_size + 2) if split else (1,), dtype=torch.float32, device=qkv.device
    )
    head_pad = triton.next_power_of_2(head_size)
    _paged_attention[(num_tiles, kv_heads, num_chunks if split else 1)](
        qkv,
        key_cache,
        value_cache,
        out,
        partial,
        meta.query_start,
        meta.seq_lens,
        meta.block_table_rows,
        meta.block_tables,
        num_seqs,
        num_chunks,
        shape.scale,
        qkv.stride(0),
        meta.block_tables.stride(0),
        H=heads,
        KH=kv_heads,
        HD=head_size,
        HD_PAD=head_pad,
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK_Q=block_q,
        ROWS=max(_MIN_ROWS, triton.next_power_of_2(block_q * group)),
        CHUNK=CHUNK,
        WINDOW=shape.sliding_window or 0,
        SOFT_CAP=shape.soft_cap or 0.0,
        SPLIT=split,
        UPCAST=needs_upcast(qkv.dtype),
    )
    if split:
        _fold_chunks[(tokens * heads,)](out, partial, num_chunks, HD=head_size, HD_PAD=head_pad)
    return out
