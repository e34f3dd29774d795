"""Every Triton operator against the operators in plain torch (fp32), case by case. Used by `bench.gpu`.

Where there is no GPU the kernels run in Triton's interpreter, on the CPU and over few, tiny shapes:
``TRITON_INTERPRET=1`` must be set before this module is imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from triton.runtime.errors import TritonError

from engine_worker.kernels.attention_torch import PagedHeads, TorchKvCache
from engine_worker.kernels.gpu.matmul import matmul
from engine_worker.kernels.gpu.paged_attention import CHUNK, paged_attention
from engine_worker.kernels.ops import Activation, AttentionMetadata, AttentionShape, DenseWeight
from engine_worker.kernels.ops_torch import TorchOps
from engine_worker.kernels.triton_ops import TritonKvCache, TritonOps

TOLERANCE: Final = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
EPS: Final = 1e-5
Lengths = Sequence[tuple[int, int]]  # (new tokens, tokens in all) of each sequence


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison: the norm of the difference over the norm of what was expected."""

    name: str
    error: float
    tolerance: float

    @property
    def is_good(self) -> bool:
        return self.error <= self.tolerance  # and so not where it is not a number


@dataclass(frozen=True, slots=True)
class Grid:
    """What is combined with what."""

    dtypes: Sequence[torch.dtype]
    block_sizes: Sequence[int]
    heads: Sequence[tuple[int, int, int]]  # (query heads, KV heads, head size)
    batches: Sequence[Lengths]
    rows: Sequence[int]
    widths: Sequence[int]  # hidden sizes
    long_context: int  # for the split over keys; more than one chunk


FULL: Final = Grid(
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
    block_sizes=(16, 32, 128),
    heads=((4, 4, 64), (9, 3, 64), (32, 8, 64), (32, 8, 128), (12, 2, 128), (8, 1, 256), (4, 2, 80), (6, 3, 96)),
    batches=(
        ((1, 1),),
        ((1, 33), (1, 512), (1, 513), (1, 4097)),
        ((7, 7), (64, 64), (513, 1025)),
        ((1, 33), (9, 50), (1, 1), (7, 7), (1, 2000), (130, 300)),
        tuple((1, 17 + 13 * i) for i in range(67)),
    ),
    rows=(1, 3, 64, 300),
    widths=(64, 576, 2048),
    long_context=9000,
)
TINY: Final = Grid(
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
    block_sizes=(16,),
    heads=((3, 1, 64), (2, 2, 64)),
    batches=(((1, 18), (5, 7), (1, 1)),),
    rows=(2,),
    widths=(64,),
    long_context=CHUNK + 30,
)


def run_checks(grid: Grid, device: torch.device) -> Iterator[Check]:
    """Every comparison of ``grid``, as it is made."""
    torch.manual_seed(0)
    for dtype, rows, width in itertools.product(grid.dtypes, grid.rows, grid.widths):
        yield from _row_checks(dtype, rows, width, device)
    for dtype, block, (heads, kv_heads, size) in itertools.product(grid.dtypes, grid.block_sizes, grid.heads):
        shape = AttentionShape(heads, kv_heads, size, size**-0.5)
        for batch in grid.batches:
            checks = _attention_checks(dtype, block, shape, batch, device)
            yield from _launched(checks, f"{shape} {dtype} block {block}")
    for dtype, variant in itertools.product(grid.dtypes, ({"sliding_window": 24}, {"soft_cap": 30.0})):
        shape = AttentionShape(4, 2, 64, 0.125, **variant)  # type: ignore[arg-type]
        checks = _attention_checks(dtype, grid.block_sizes[0], shape, grid.batches[-1], device)
        yield from _launched(checks, f"{shape} {dtype}")
    yield from _invariance_checks(grid, device)


def ragged(lengths: Lengths, block_size: int, device: torch.device) -> tuple[AttentionMetadata, int]:
    """Sequences whose blocks are in random order, and the number of blocks."""
    counts = [-(-total // block_size) for _, total in lengths]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).int()
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    positions, slots = [], []
    for row, ((new, total), blocks) in enumerate(zip(lengths, torch.split(order, counts), strict=True)):
        tables[row, : len(blocks)] = blocks
        at = torch.arange(total - new, total)
        positions.append(at)
        slots.append(blocks[at // block_size] * block_size + at % block_size)
    starts = torch.tensor([0, *itertools.accumulate(new for new, _ in lengths)])
    meta = AttentionMetadata(
        query_start=starts.int().to(device),
        seq_lens=torch.tensor([total for _, total in lengths], dtype=torch.int32, device=device),
        block_table_rows=torch.arange(len(lengths), dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        slot_mapping=torch.cat(slots).int().to(device),
        positions=torch.cat(positions).int().to(device),
        max_query_len=max(new for new, _ in lengths),
        max_seq_len=max(total for _, total in lengths),
    )
    return meta, sum(counts)


def _launched(checks: Iterator[Check], name: str) -> Iterator[Check]:
    """``checks``; a kernel that this GPU cannot run, for want of shared memory or so, is a failed one."""
    try:
        yield from checks
    except TritonError as error:
        yield Check(f"{name}: {str(error).strip().splitlines()[0]}", float("inf"), 0.0)


def _check(name: str, dtype: torch.dtype, got: Tensor, want: Tensor) -> Check:
    error = (got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-9)
    return Check(f"{name} {str(dtype).removeprefix('torch.')}", float(error), TOLERANCE[dtype])


def _equal(name: str, got: Tensor, want: Tensor) -> Check:
    """For what must be the same bit for bit."""
    return Check(f"{name}, bit for bit", float((got != want).sum()), 0.0)


def _row_checks(dtype: torch.dtype, rows: int, width: int, device: torch.device) -> Iterator[Check]:
    ours, plain = TritonOps(dtype, device), TorchOps(torch.float32, device)
    where = f"[{rows}, {width}]"

    def weight(n: int, k: int) -> DenseWeight:
        return DenseWeight((torch.randn(n, k) * k**-0.5).to(dtype))

    x, norm = torch.randn(rows, width, device=device), torch.rand(width, device=device) + 0.5
    matrix, gate, up = weight(2 * width, width), weight(3 * width, width), weight(3 * width, width)
    back = weight(width, 3 * width)
    yield _check(f"norm {where}", torch.float32, ours.norm(x, norm, EPS), plain.norm(x, norm, EPS))
    compared: list[tuple[str, Callable[[TritonOps | TorchOps], Tensor]]] = [
        ("norm_linear", lambda ops: ops.norm_linear(x, norm, EPS, ops.pack(matrix, norm.repeat(2).cpu()))),
        ("logits", lambda ops: ops.logits(x, norm, EPS, ops.pack_head(matrix))),
        ("linear_add", lambda ops: _linear_add(ops, x, back)),
    ]
    for name, compute in compared:
        yield _check(f"{name} {where}", dtype, compute(ours), compute(plain))
    for activation in Activation:
        got, want = (ops.norm_gate_up(x, norm, EPS, ops.pack_gate_up(gate, up), activation) for ops in (ours, plain))
        yield _check(f"norm_gate_up {activation.value} {where}", dtype, got, want)


def _linear_add(ops: TritonOps | TorchOps, x: Tensor, weight: DenseWeight) -> Tensor:
    residual = x.clone()
    ops.linear_add(torch.cat([x, x, x], 1).to(ops.activation_dtype), ops.pack(weight), residual)
    return residual


def _inputs(
    dtype: torch.dtype, block_size: int, shape: AttentionShape, num_blocks: int, num_tokens: int, device: torch.device
) -> tuple[Tensor, TritonKvCache]:
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
    cache = TritonOps(dtype, device).allocate_kv(1, num_blocks, block_size, shape.num_kv_heads, shape.head_size)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    return torch.randn(num_tokens, width, device=device).to(dtype), cache


def _attention_checks(
    dtype: torch.dtype, block_size: int, shape: AttentionShape, batch: Lengths, device: torch.device
) -> Iterator[Check]:
    """rope_write_kv, then attention over what it wrote; with a norm per head where heads are few."""
    meta, num_blocks = ragged(batch, block_size, device)
    qkv, cache = _inputs(dtype, block_size, shape, num_blocks, len(meta.positions), device)
    keys, values = (PagedHeads(heads.float(), None) for heads in (cache.keys[0], cache.values[0]))
    plain_cache = TorchKvCache([keys], [values], num_blocks=num_blocks, block_size=block_size)
    ours, plain = TritonOps(dtype, device), TorchOps(torch.float32, device)
    angles = torch.arange(meta.max_seq_len)[:, None] / 1e4 ** (torch.arange(0, shape.head_size, 2) / shape.head_size)
    cos_sin = torch.cat([angles.cos(), angles.sin()], 1).to(device)
    norms = tuple(torch.rand(2, shape.head_size, device=device) + 0.5) if shape.num_heads < 9 else (None, None)
    name = f"heads {shape.num_heads}/{shape.num_kv_heads}x{shape.head_size} block {block_size} batch {len(batch)}"
    name += f" window {shape.sliding_window}" * bool(shape.sliding_window) + " capped" * bool(shape.soft_cap)
    want_qkv = qkv.float()
    ours.rope_write_kv(qkv, cos_sin, cache, 0, meta, shape, *norms)
    plain.rope_write_kv(want_qkv, cos_sin, plain_cache, 0, meta, shape, *norms)
    yield _check(f"rope {name}", dtype, qkv, want_qkv)
    yield _check(f"keys written {name}", dtype, cache.keys[0], keys.stored)
    yield _check(f"values written {name}", dtype, cache.values[0], values.stored)
    got, want = ours.attention(qkv, cache, 0, meta, shape), plain.attention(want_qkv, plain_cache, 0, meta, shape)
    yield _check(f"attention {name}", dtype, got, want)


def _invariance_checks(grid: Grid, device: torch.device) -> Iterator[Check]:
    """What neither the split over keys nor the batch may change."""
    shape, block_size, dtype = AttentionShape(2, 1, 64, 0.125), 128, grid.dtypes[-1]
    meta, num_blocks = ragged(((1, grid.long_context), (1, 17)), block_size, device)
    qkv, cache = _inputs(dtype, block_size, shape, num_blocks, 2, device)
    arguments = qkv, cache.keys[0], cache.values[0], meta, shape
    whole = paged_attention(*arguments, split=False)
    yield _equal("attention split over keys", paged_attention(*arguments, split=True), whole)
    alone = AttentionMetadata(
        query_start=torch.tensor([0, 1], dtype=torch.int32, device=device),
        seq_lens=meta.seq_lens[1:],
        block_table_rows=meta.block_table_rows[1:],
        block_tables=meta.block_tables,
        slot_mapping=meta.slot_mapping[1:],
        positions=meta.positions[1:],
        max_query_len=1,
        max_seq_len=17,
    )
    got = paged_attention(qkv[1:], cache.keys[0], cache.values[0], alone, shape)
    yield _equal("attention alone and in a batch", got, whole[1:])
    x, weight = (torch.randn(size, 200, device=device).to(dtype) for size in (70, 90))
    product = matmul(x, weight, None)
    yield _equal("fixed-order product of one row", matmul(x[:1], weight, None), product[:1])
    yield _equal("fixed-order product of a few rows", matmul(x[64:], weight, None), product[64:])
    if device.type == "cuda":  # the interpreter's BLAS sums by the place in a tile
        yield _equal("fixed-order product elsewhere in its tile", matmul(x[13:30], weight, None), product[13:30])
