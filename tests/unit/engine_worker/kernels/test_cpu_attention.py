"""Rotary embedding, the paged cache and attention of the native kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_worker.kernels.build import TargetName
from engine_worker.kernels.ops import AttentionShape, Ops
from engine_worker.kernels.packing import WeightFormat
from tests.unit.engine_worker.kernels.batches import Piece, World, expected_attention, make_world, metadata, tokens
from tests.unit.engine_worker.kernels.native import each_target, native_ops, needs_native

pytestmark = needs_native

DENSE: Final[tuple[WeightFormat, ...]] = ("fp32", "bf16")
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 6e-3}  # relative, in the Frobenius norm


def run_steps(
    ops: Ops, world: World, steps: list[list[Piece]], q_norm: Tensor | None = None, k_norm: Tensor | None = None
) -> dict[int, Tensor]:
    """Attention output of each sequence after all steps, tokens in order."""
    s = world.shape
    cache = ops.allocate_kv(1, world.num_blocks, world.block_size, s.num_kv_heads, s.head_size)
    out: dict[int, list[Tensor]] = {}
    for pieces in steps:
        meta, qkv = metadata(world, pieces), tokens(world, pieces)
        ops.rope_write_kv(qkv, world.cos_sin, cache, 0, meta, s, q_norm, k_norm, 1e-6)
        y = ops.attention(qkv, cache, 0, meta, s)
        for piece, rows in zip(pieces, torch.split(y, [p.new for p in pieces]), strict=True):
            out.setdefault(piece.sequence, []).append(rows)
    return {sequence: torch.cat(rows) for sequence, rows in out.items()}


def whole(world: World) -> list[list[Piece]]:
    return [[Piece(i, 0, len(x)) for i, x in enumerate(world.qkv)]]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@each_target
@pytest.mark.parametrize("weight_format", DENSE)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "rotary_dim", "block_size"),
    [
        (9, 3, 64, 64, 32),
        (4, 4, 64, 64, 64),
        (2, 1, 80, 32, 32),
        (3, 1, 96, 96, 32),
        (8, 2, 128, 128, 32),
        (2, 1, 256, 64, 96),
        (50, 1, 32, 32, 32),
        (2, 2, 16, 12, 32),
    ],
)
def test_equals_dense_attention(
    target: TargetName,
    weight_format: WeightFormat,
    heads: int,
    kv_heads: int,
    head_size: int,
    rotary_dim: int,
    block_size: int,
) -> None:
    ops = native_ops(weight_format, target=target)
    shape = AttentionShape(heads, kv_heads, head_size, head_size**-0.5)
    world = make_world(shape, [1, 33, 300], ops.activation_dtype, block_size=block_size, rotary_dim=rotary_dim)
    for sequence, got in run_steps(ops, world, whole(world)).items():
        assert error(got, expected_attention(world, sequence)) < TOLERANCE[ops.activation_dtype]


@each_target
@pytest.mark.parametrize("weight_format", DENSE)
@pytest.mark.parametrize("window", [1, 17, 32, 256, 300, 10_000])
def test_sliding_window(target: TargetName, weight_format: WeightFormat, window: int) -> None:
    ops = native_ops(weight_format, target=target)
    shape = AttentionShape(4, 2, 64, 0.125, sliding_window=window)
    world = make_world(shape, [700, 40], ops.activation_dtype, rotary_dim=64)
    for sequence, got in run_steps(ops, world, whole(world)).items():
        assert error(got, expected_attention(world, sequence)) < TOLERANCE[ops.activation_dtype]


@each_target
@pytest.mark.parametrize("weight_format", DENSE)
def test_soft_cap_and_head_norms(target: TargetName, weight_format: WeightFormat) -> None:
    ops = native_ops(weight_format, target=target)
    shape = AttentionShape(4, 2, 64, 1.0, soft_cap=5.0)
    world = make_world(shape, [90], ops.activation_dtype, rotary_dim=40)
    q_norm, k_norm = torch.rand(64) + 0.5, torch.rand(64) + 0.5
    got = run_steps(ops, world, whole(world), q_norm, k_norm)[0]
    assert error(got, expected_attention(world, 0, q_norm, k_norm)) < 4 * TOLERANCE[ops.activation_dtype]


@each_target
@settings(max_examples=25)
@given(data=st.data())
def test_a_token_is_the_same_bits_in_any_batch_any_chunks_and_any_threads(
    target: TargetName, data: st.DataObject
) -> None:
    weight_format: WeightFormat = data.draw(st.sampled_from(DENSE))
    window = data.draw(st.sampled_from([None, 5, 100, 400]))
    lengths = data.draw(st.lists(st.integers(1, 600), min_size=1, max_size=4))
    ops = native_ops(weight_format, 1, target)
    shape = AttentionShape(6, 2, 64, 0.125, sliding_window=window)
    world = make_world(shape, lengths, ops.activation_dtype, rotary_dim=64, seed=data.draw(st.integers(0, 99)))
    alone = {i: run_steps(ops, world, [[Piece(i, 0, n)]])[i] for i, n in enumerate(lengths)}

    done = [0] * len(lengths)
    steps: list[list[Piece]] = []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        waiting = [i for i, n in enumerate(lengths) if done[i] < n]
        chosen = data.draw(st.permutations(waiting))[: data.draw(st.integers(1, len(waiting)))]
        step = []
        for i in chosen:
            new = min(lengths[i] - done[i], data.draw(st.sampled_from([1, 1, 2, 31, 64, 200, 600])))
            step.append(Piece(i, done[i], new))
            done[i] += new
        steps.append(step)
    batched = run_steps(native_ops(weight_format, data.draw(st.integers(1, 4)), target), world, steps)
    assert all(torch.equal(alone[i], batched[i]) for i in alone)


@each_target
def test_a_long_context_is_shared_out_over_threads_without_changing_a_bit(target: TargetName) -> None:
    shape = AttentionShape(3, 1, 64, 0.125)
    world = make_world(shape, [3000], torch.bfloat16, rotary_dim=64)
    steps = [[Piece(0, 0, 2999)], [Piece(0, 2999, 1)]]
    results = [run_steps(native_ops("bf16", threads, target), world, steps)[0] for threads in (1, 2, 3)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@each_target
def test_what_a_former_owner_left_in_a_block_does_no_harm(target: TargetName) -> None:
    ops = native_ops("bf16", target=target)
    shape = AttentionShape(3, 1, 64, 0.125)
    world = make_world(shape, [40], torch.bfloat16, rotary_dim=64)
    clean = run_steps(ops, world, whole(world))[0]
    cache = ops.allocate_kv(1, world.num_blocks, 32, 1, 64)
    for value in (float("nan"), float("inf")):
        spoiled = replace(world, block_tables=world.block_tables, qkv=[torch.full((64, 5 * 64), value).bfloat16()])
        pieces = [Piece(0, 0, 64)]
        ops.rope_write_kv(
            tokens(spoiled, pieces), torch.cat([world.cos_sin] * 2), cache, 0, metadata(spoiled, pieces), shape
        )
        pieces = [Piece(0, 0, 40)]
        qkv, meta = tokens(world, pieces), metadata(world, pieces)
        ops.rope_write_kv(qkv, world.cos_sin, cache, 0, meta, shape)
        assert torch.equal(ops.attention(qkv, cache, 0, meta, shape), clean)


@pytest.mark.parametrize(("block_size", "head_size"), [(16, 64), (48, 64), (32, 63), (32, 288)])
def test_cache_shapes_that_cannot_be_served_are_refused(block_size: int, head_size: int) -> None:
    with pytest.raises(ValueError, match="native kernels need"):
        native_ops("bf16").allocate_kv(1, 4, block_size, 2, head_size)


def test_bytes_per_block_are_what_the_cache_takes() -> None:
    ops = native_ops("bf16")
    cache = ops.allocate_kv(3, 7, 32, 2, 80)
    assert cache.memory.numel() == 7 * ops.kv_bytes_per_block(3, 32, 2, 80)
    assert not cache.memory.any()
