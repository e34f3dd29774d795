"""Each Triton operator against plain torch, over awkward shapes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from engine_worker.kernels.gpu.gated_activation import gated_activation
from engine_worker.kernels.gpu.launch import IS_INTERPRETED
from engine_worker.kernels.gpu.paged_attention import paged_attention
from engine_worker.kernels.gpu.rms_norm import rms_norm
from engine_worker.kernels.gpu.rotary_kv import rotary_kv
from engine_worker.kernels.ops import Activation, AttentionMetadata, AttentionShape, Ops, QuantizedWeight
from engine_worker.kernels.triton_ops import TritonOps

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    error = (got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-9)
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


def ragged_batch(lengths: list[tuple[int, int]], block_size: int, spare_rows: int = 2) -> AttentionMetadata:
    """Sequences of (new tokens, total tokens) whose blocks and table rows are shuffled."""
    generator = torch.Generator().manual_seed(len(lengths) * 1000 + block_size)
    blocks_of = [math.ceil(total / block_size) for _, total in lengths]
    blocks = torch.randperm(sum(blocks_of) + 1, generator=generator).int()
    rows = torch.randperm(len(lengths) + spare_rows, generator=generator)[: len(lengths)].int()
    tables = torch.full((len(lengths) + spare_rows, max(blocks_of)), 10**6, dtype=torch.int32)
    positions, slots, used = [], [], 0
    for (new, total), count, row in zip(lengths, blocks_of, rows.tolist(), strict=True):
        tables[row, :count] = blocks[used : used + count]
        used += count
        position = torch.arange(total - new, total, dtype=torch.int32)
        positions.append(position)
        slots.append(tables[row, (position // block_size).long()] * block_size + position % block_size)
    starts = torch.tensor([0, *[new for new, _ in lengths]]).cumsum(0).int()
    return AttentionMetadata(
        query_start=starts.to(DEVICE),
        seq_lens=torch.tensor([total for _, total in lengths], dtype=torch.int32, device=DEVICE),
        block_table_rows=rows.to(DEVICE),
        block_tables=tables.to(DEVICE),
        slot_mapping=torch.cat(slots).int().to(DEVICE),
        positions=torch.cat(positions).to(DEVICE),
        max_query_len=max(new for new, _ in lengths),
        max_seq_len=max(total for _, total in lengths),
    )


def num_blocks(meta: AttentionMetadata) -> int:
    tables = meta.block_tables
    return int(tables[tables < 10**6].max()) + 1


def naive_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, meta: AttentionMetadata, shape: AttentionShape
) -> Tensor:
    """Sequence by sequence and head by head in fp32."""
    block_size = keys.shape[1]
    out = torch.zeros(qkv.shape[0], shape.num_heads * shape.head_size)
    group = shape.num_heads // shape.num_kv_heads
    for i in range(len(meta.seq_lens)):
        start, end, total = int(meta.query_start[i]), int(meta.query_start[i + 1]), int(meta.seq_lens[i])
        at = torch.arange(total)
        table = meta.block_tables[int(meta.block_table_rows[i])].cpu()
        slots = table[at // block_size].long() * block_size + at % block_size
        positions = meta.positions[start:end].cpu()[:, None]
        visible = at[None, :] <= positions
        if shape.sliding_window is not None:
            visible &= at[None, :] > positions - shape.sliding_window
        for head in range(shape.num_heads):
            columns = slice(head * shape.head_size, (head + 1) * shape.head_size)
            query = qkv[start:end, columns].float().cpu()
            key = keys.flatten(0, 1)[:, head // group].float().cpu()[slots]
            value = values.flatten(0, 1)[:, head // group].float().cpu()[slots]
            scores = query @ key.T * shape.scale
            if shape.soft_cap is not None:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            out[start:end, columns] = scores.masked_fill(~visible, -torch.inf).softmax(-1) @ value
    return out


def random_attention_inputs(
    meta: AttentionMetadata, shape: AttentionShape, block_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
    cache = (num_blocks(meta), block_size, shape.num_kv_heads, shape.head_size)
    qkv = torch.randn(meta.positions.shape[0], width, dtype=dtype, device=DEVICE)
    return (
        qkv,
        torch.randn(cache, dtype=dtype, device=DEVICE),
        torch.randn(cache, dtype=dtype, device=DEVICE),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 64, 100, 576])
def test_rms_norm_equals_torch(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, width, device=DEVICE), torch.randn(width, device=DEVICE)
    want = torch.nn.functional.rms_norm(x, (width,), weight, 1e-5)
    assert_near(rms_norm(x, weight, 1e-5, dtype), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("width", [7, 1536])
def test_gated_activation_equals_torch(width: int, activation: Activation, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(3, 2 * width, device=DEVICE).to(dtype)
    gate, up = gate_up.float().chunk(2, -1)
    silu, gelu = torch.nn.functional.silu, torch.nn.functional.gelu
    want = (silu(gate) if activation is Activation.SILU else gelu(gate, approximate="tanh")) * up
    assert_near(gated_activation(gate_up, activation), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("head_size", "rotary"), [(64, 64), (80, 80), (64, 16), (96, 48)])
def test_rotary_kv_equals_torch(head_size: int, rotary: int, has_norm: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_size=head_size, scale=1.0)
    meta = ragged_batch([(3, 20), (1, 5)], 16)
    qkv, keys, values = random_attention_inputs(meta, shape, 16, dtype)
    cos_sin = torch.randn(32, rotary, device=DEVICE)
    q_norm, k_norm = torch.randn(head_size, device=DEVICE), torch.randn(head_size, device=DEVICE)

    heads = qkv.float().view(-1, 8, head_size).clone()
    if has_norm:
        normed = torch.nn.functional.rms_norm(heads, (head_size,), None, 1e-6)
        heads[:, :4], heads[:, 4:6] = normed[:, :4] * q_norm, normed[:, 4:6] * k_norm
    cos, sin = cos_sin[meta.positions.long()][:, None].chunk(2, -1)
    half = rotary // 2
    low, high = heads[:, :6, :half].clone(), heads[:, :6, half:rotary].clone()
    heads[:, :6, :half], heads[:, :6, half:rotary] = low * cos - high * sin, high * cos + low * sin

    rotary_kv(qkv, cos_sin, keys, values, meta, shape, q_norm if has_norm else None, k_norm if has_norm else None, 1e-6)

    slots = meta.slot_mapping.long()
    assert_near(qkv.view(-1, 8, head_size)[:, :6], heads[:, :6], dtype)
    assert_near(keys.flatten(0, 1)[slots], heads[:, 4:6], dtype)
    assert torch.equal(values.flatten(0, 1)[slots], heads[:, 6:].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1)])
def test_attention_of_a_ragged_batch_equals_naive(
    heads: int, kv_heads: int, block_size: int, dtype: torch.dtype
) -> None:
    shape = AttentionShape(num_heads=heads, num_kv_heads=kv_heads, head_size=64, scale=0.125)
    meta = ragged_batch([(1, 33), (9, 50), (1, 1), (7, 7)], block_size)
    qkv, keys, values = random_attention_inputs(meta, shape, block_size, dtype)
    got = paged_attention(qkv, keys, values, meta, shape)
    assert_near(got.cpu(), naive_attention(qkv, keys, values, meta, shape), dtype)


@pytest.mark.parametrize(("window", "cap"), [(8, None), (None, 5.0), (20, 30.0)])
@pytest.mark.parametrize("head_size", [80, 128])
def test_attention_with_a_window_or_a_soft_cap_equals_naive(
    head_size: int, window: int | None, cap: float | None
) -> None:
    shape = AttentionShape(
        num_heads=4, num_kv_heads=2, head_size=head_size, scale=0.3, sliding_window=window, soft_cap=cap
    )
    meta = ragged_batch([(1, 40), (12, 30)], 16)
    qkv, keys, values = random_attention_inputs(meta, shape, 16, torch.float32)
    got = paged_attention(qkv, keys, values, meta, shape)
    assert_near(got.cpu(), naive_attention(qkv, keys, values, meta, shape), torch.float32)


@pytest.mark.parametrize("window", [None, 600])
def test_splitting_the_keys_changes_no_bit(window: int | None) -> None:
    shape = AttentionShape(num_heads=2, num_kv_heads=1, head_size=64, scale=0.125, sliding_window=window)
    meta = ragged_batch([(1, 1100), (1, 17)], 128)
    qkv, keys, values = random_attention_inputs(meta, shape, 128, torch.float32)
    split = paged_attention(qkv, keys, values, meta, shape, split=True)
    whole = paged_attention(qkv, keys, values, meta, shape, split=False)
    assert torch.equal(split, whole)
    assert_near(whole.cpu(), naive_attention(qkv, keys, values, meta, shape), torch.float32)


def test_a_token_attends_the_same_alone_and_in_a_batch() -> None:
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_size=64, scale=0.125)
    meta = ragged_batch([(5, 21), (1, 30), (3, 3)], 16)
    qkv, keys, values = random_attention_inputs(meta, shape, 16, torch.float32)
    together = paged_attention(qkv, keys, values, meta, shape)
    for i in range(3):
        start, end = int(meta.query_start[i]), int(meta.query_start[i + 1])
        alone = AttentionMetadata(
            query_start=torch.tensor([0, end - start], dtype=torch.int32, device=DEVICE),
            seq_lens=meta.seq_lens[i : i + 1],
            block_table_rows=meta.block_table_rows[i : i + 1],
            block_tables=meta.block_tables,
            slot_mapping=meta.slot_mapping[start:end],
            positions=meta.positions[start:end],
            max_query_len=end - start,
            max_seq_len=int(meta.seq_lens[i]),
        )
        assert torch.equal(paged_attention(qkv[start:end], keys, values, alone, shape), together[start:end])


def test_quantised_weights_are_widened_exactly() -> None:
    torch.manual_seed(0)
    values = torch.randint(0, 16, (4, 64), dtype=torch.uint8)
    scales, mins = torch.rand(4, 2).half(), torch.randn(4, 2).half()
    ops: Ops = TritonOps(torch.float32, torch.device(DEVICE))
    packed = ops.pack(QuantizedWeight(values, scales, mins))
    want = values.view(4, 2, 32) * scales.float()[..., None] + mins.float()[..., None]
    assert torch.equal(packed.storage.cpu(), want.view(4, 64))


@pytest.mark.parametrize("block_size", [8, 48, 1024])
def test_a_block_size_that_cannot_be_served_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size .* it is {block_size}"):
        TritonOps(torch.float32, torch.device(DEVICE)).allocate_kv(1, 4, block_size, 2, 64)
