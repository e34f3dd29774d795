"""Paged attention in plain torch: gather the keys and values of a sequence, then attend.

Decodes (one query token) are computed together, padded to the longest; every other sequence by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine_worker.kernels.kv_quantization import dequantize_heads, quantize_heads
from engine_worker.kernels.ops import AttentionMetadata, AttentionShape


@dataclass(frozen=True, slots=True)
class PagedHeads:
    """The keys, or the values, of one layer."""

    stored: Tensor  # [num_blocks, block_size, KH, HD], activation dtype or int8
    scales: Tensor | None  # of int8: bf16 [num_blocks, block_size, KH]

    def write(self, slots: Tensor, heads: Tensor) -> None:
        """heads: [T, KH, HD], to the slots [T]."""
        if self.scales is not None:
            heads, scales = quantize_heads(heads)
            self.scales.flatten(0, 1)[slots] = scales
        self.stored.flatten(0, 1)[slots] = heads

    def read(self, blocks: Tensor) -> Tensor:
        """[..., block_size, KH, HD] for blocks [...]; int8 becomes fp32."""
        return (
            self.stored[blocks] if self.scales is None else dequantize_heads(self.stored[blocks], self.scales[blocks])
        )


@dataclass(frozen=True, slots=True)
class TorchKvCache:
    """Keys and values of each layer, block after block."""

    keys: list[PagedHeads]
    values: list[PagedHeads]
    num_blocks: int
    block_size: int

    def tensors(self) -> list[Tensor]:
        """All of the memory; block is the first dimension."""
        layers = (*self.keys, *self.values)
        return [part for layer in layers for part in (layer.stored, layer.scales) if part is not None]

    def clear(self, blocks: Sequence[int]) -> None:
        for part in self.tensors():
            part[list(blocks)] = 0


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one query token. Key j of a row stands at position first_key[row] + j."""

    tokens: Tensor  # [B] int64: index of each one's token
    blocks: Tensor  # [B, n] int64: physical blocks that are read
    mask: Tensor  # [B, 1, 1, n * block_size] bool: keys that are seen


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence with several query tokens."""

    first_token: int
    num_tokens: int
    blocks: Tensor  # [n] int64
    num_keys: int  # of the gathered ones, from the first on
    mask: Tensor | None  # [num_tokens, num_keys] bool; None = plain causal from position 0 on


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What is read for each sequence of a step; the same for all layers with the same window."""

    decodes: _Decodes | None
    prefills: tuple[_Prefill, ...]


def plan_attention(meta: AttentionMetadata, block_size: int, window: int | None) -> AttentionPlan:
    """Sort the sequences of a step into decodes and others, and find the keys that each may see."""
    starts, lens = meta.query_start.tolist(), meta.seq_lens.tolist()
    rows = meta.block_table_rows.tolist()
    lengths = [end - start for start, end in itertools.pairwise(starts)]
    single = [i for i, length in enumerate(lengths) if length == 1]
    prefills = tuple(
        _plan_prefill(meta, block_size, window, (starts[i], length, lens[i], rows[i]))
        for i, length in enumerate(lengths)
        if length > 1
    )
    return AttentionPlan(_plan_decodes(meta, block_size, window, single) if single else None, prefills)


def _plan_decodes(meta: AttentionMetadata, block_size: int, window: int | None, single: list[int]) -> _Decodes:
    device = meta.block_tables.device
    index = torch.tensor(single, device=device)
    lens = meta.seq_lens[index].long()  # [B]
    first_seen = torch.zeros_like(lens) if window is None else (lens - window).clamp_min(0)
    first_block = first_seen // block_size
    last_block = (lens - 1) // block_size
    columns = first_block[:, None] + torch.arange(int((last_block - first_block).max()) + 1, device=device)
    # Beyond its own last block a row of the table holds anything: read that block again, the mask hides it.
    tables = meta.block_tables[meta.block_table_rows[index].long()].long()
    blocks = tables.gather(1, columns.minimum(last_block[:, None]))
    positions = (columns[:, :, None] * block_size + torch.arange(block_size, device=device)).flatten(1)
    mask = (positions < lens[:, None]) & (positions >= first_seen[:, None])
    return _Decodes(meta.query_start[index].long(), blocks, mask[:, None, None])


def _plan_prefill(
    meta: AttentionMetadata, block_size: int, window: int | None, sequence: tuple[int, int, int, int]
) -> _Prefill:
    first_token, num_tokens, seq_len, row = sequence
    context = seq_len - num_tokens
    first_block = 0 if window is None else max(0, context - window + 1) // block_size
    first_key = first_block * block_size
    blocks = meta.block_tables[row, first_block : -(-seq_len // block_size)].long()
    mask = None
    if first_key or context or window is not None:
        device = blocks.device
        queries = torch.arange(context, seq_len, device=device)[:, None]
        keys = torch.arange(first_key, seq_len, device=device)
        mask = keys <= queries
        if window is not None:
            mask &= keys > queries - window
    return _Prefill(first_token, num_tokens, blocks, seq_len - first_key, mask)


def paged_attention(
    q: Tensor, keys: PagedHeads, values: PagedHeads, plan: AttentionPlan, shape: AttentionShape, out: Tensor
) -> None:
    """q, out: [T, H, HD]; keys, values: one layer's cache. Writes every row of ``out``."""
    if plan.decodes is not None:
        _attend_decodes(q, keys, values, plan.decodes, shape, out)
    for item in plan.prefills:
        _attend_prefill(q, keys, values, item, shape, out)


def _attend_decodes(
    q: Tensor, keys: PagedHeads, values: PagedHeads, item: _Decodes, shape: AttentionShape, out: Tensor
) -> None:
    num_rows = item.tokens.shape[0]
    k = keys.read(item.blocks).flatten(1, 2).transpose(1, 2)  # [B, KH, n, HD]
    v = values.read(item.blocks).flatten(1, 2).transpose(1, 2)
    # The query heads of a group stand as query rows: keys and values are passed over once and not repeated.
    grouped = q[item.tokens].view(num_rows, shape.num_kv_heads, -1, shape.head_size)
    attended = _attend(grouped, k, v, item.mask, shape)
    out[item.tokens] = attended.reshape(num_rows, shape.num_heads, shape.head_size).to(out.dtype)


def _attend_prefill(
    q: Tensor, keys: PagedHeads, values: PagedHeads, item: _Prefill, shape: AttentionShape, out: Tensor
) -> None:
    k = keys.read(item.blocks).flatten(0, 1)[: item.num_keys].transpose(0, 1)  # [KH, n, HD]
    v = values.read(item.blocks).flatten(0, 1)[: item.num_keys].transpose(0, 1)
    rows = slice(item.first_token, item.first_token + item.num_tokens)
    attended = _attend(q[rows].transpose(0, 1)[None], k[None], v[None], item.mask, shape)
    out[rows] = attended[0].transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, shape: AttentionShape) -> Tensor:
    """q: [B, Hq, Q, HD]; k, v: [B, KH, n, HD] with Hq a multiple of KH; mask None = causal, Q = n."""
    q = q.to(k.dtype)
    has_groups = q.shape[1] != k.shape[1]
    if shape.soft_cap is None:
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=shape.scale, enable_gqa=has_groups
        )
    if has_groups:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = (q.float() @ k.float().transpose(-1, -2)) * shape.scale
    scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v.float()).to(q.dtype)
