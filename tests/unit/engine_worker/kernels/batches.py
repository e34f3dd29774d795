"""Batches of paged sequences with random activations, and what attention should make of them, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine_worker.kernels.ops import AttentionMetadata, AttentionShape


@dataclass(frozen=True)
class Piece:
    """``new`` tokens of sequence ``sequence``, after ``before`` tokens that are in the cache already."""

    sequence: int
    before: int
    new: int


@dataclass(frozen=True)
class World:
    """Whole sequences: their unrotated Q, K and V, and the blocks they own."""

    shape: AttentionShape
    block_size: int
    qkv: list[Tensor]  # activation [length, (H + 2 KH) * HD] of each sequence
    block_tables: Tensor
    cos_sin: Tensor

    @property
    def num_blocks(self) -> int:
        return int(self.block_tables.max()) + 1


def make_world(
    shape: AttentionShape,
    lengths: list[int],
    dtype: torch.dtype,
    *,
    block_size: int = 32,
    rotary_dim: int,
    seed: int = 0,
) -> World:
    g = torch.Generator().manual_seed(seed)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
    counts = [-(-n // block_size) for n in lengths]
    order = torch.randperm(sum(counts), generator=g).int()
    tables = torch.zeros(len(lengths) + 1, max(counts) + 1, dtype=torch.int32)
    at = 0
    for row, count in enumerate(counts):  # sequence i owns row len - i: rows are not in the order of sequences
        tables[len(lengths) - row, :count] = order[at : at + count]
        at += count
    angles = torch.arange(max(lengths))[:, None] / 10000 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    return World(
        shape,
        block_size,
        [torch.randn(n, width, generator=g).to(dtype) for n in lengths],
        tables,
        torch.cat([angles.cos(), angles.sin()], 1).float().contiguous(),
    )


def metadata(world: World, pieces: list[Piece]) -> AttentionMetadata:
    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    positions = [p.before + i for p in pieces for i in range(p.new)]
    rows = [len(world.qkv) - p.sequence for p in pieces]
    owners = [row for row, p in zip(rows, pieces, strict=True) for _ in range(p.new)]
    b = world.block_size
    slots = [int(world.block_tables[r, t // b]) * b + t % b for r, t in zip(owners, positions, strict=True)]
    starts = [sum(p.new for p in pieces[:i]) for i in range(len(pieces) + 1)]
    return AttentionMetadata(
        query_start=ints(starts),
        seq_lens=ints([p.before + p.new for p in pieces]),
        block_table_rows=ints(rows),
        block_tables=world.block_tables,
        slot_mapping=ints(slots),
        positions=ints(positions),
        max_query_len=max(p.new for p in pieces),
        max_seq_len=max(p.before + p.new for p in pieces),
    )


def tokens(world: World, pieces: list[Piece]) -> Tensor:
    """The pieces' activations, flat."""
    return torch.cat([world.qkv[p.sequence][p.before : p.before + p.new] for p in pieces]).contiguous()


def expected_attention(
    world: World, sequence: int, q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """fp32 [length, H * HD] for one whole sequence."""
    s = world.shape
    x = world.qkv[sequence].float()
    n = len(x)
    q, k, v = torch.split(x.view(n, -1, s.head_size), [s.num_heads, s.num_kv_heads, s.num_kv_heads], 1)
    q, k = (_rotate(_head_norm(t, w, eps), world.cos_sin[:n]) for t, w in ((q, q_norm), (k, k_norm)))
    group = s.num_heads // s.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * s.scale
    if s.soft_cap:
        scores = s.soft_cap * torch.tanh(scores / s.soft_cap)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    seen = (distance >= 0) & (distance < (s.sliding_window or n + 1))
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(n, -1)


def _head_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return x if weight is None else torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin[:, None, :half], cos_sin[:, None, half:]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
