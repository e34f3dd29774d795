"""All layers in one call compute what the operators compute one by one, to the bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest
import torch
from torch import Tensor

from engine_worker.kernels.build import TargetName
from engine_worker.kernels.cpu import CpuOps
from engine_worker.kernels.ops import Activation, AttentionShape, DecoderLayer, DenseWeight, LayerOps
from engine_worker.kernels.packing import WeightFormat
from tests.unit.engine_worker.kernels.batches import Piece, World, make_world, metadata
from tests.unit.engine_worker.kernels.native import each_target, native_ops, needs_native

pytestmark = needs_native

FORMATS = [f for f in get_args(WeightFormat) if f != "auto"]
HIDDEN, INTERMEDIATE, EPS = 70, 50, 1e-5  # neither is a multiple of 32


def make_layers(
    ops: CpuOps, world: World, windows: list[int | None], *, post_norms: bool, intermediate: int = INTERMEDIATE
) -> list[DecoderLayer]:
    g = torch.Generator().manual_seed(3)
    s = world.shape

    def random(n: int, k: int) -> DenseWeight:
        return DenseWeight(torch.randn(n, k, generator=g) * 0.1)

    def norm(size: int) -> Tensor:
        return torch.rand(size, generator=g) + 0.5

    width = s.num_heads * s.head_size
    return [
        DecoderLayer(
            shape=AttentionShape(s.num_heads, s.num_kv_heads, s.head_size, s.scale, window, s.soft_cap),
            qkv=ops.pack(random(width + 2 * s.num_kv_heads * s.head_size, HIDDEN), torch.randn(2 * width, generator=g)),
            output=ops.pack(random(HIDDEN, width)),
            gate_up=ops.pack_gate_up(random(intermediate, HIDDEN), random(intermediate, HIDDEN)),
            down=ops.pack(random(HIDDEN, intermediate)),
            attention_norm=norm(HIDDEN),
            mlp_norm=norm(HIDDEN),
            norm_eps=EPS,
            activation=Activation.GELU_TANH if post_norms else Activation.SILU,
            cos_sin=world.cos_sin,
            q_norm=norm(s.head_size) if post_norms else None,
            k_norm=norm(s.head_size) if post_norms else None,
            after_attention_norm=norm(HIDDEN) if post_norms else None,
            after_mlp_norm=norm(HIDDEN) if post_norms else None,
        )
        for window in windows
    ]


def by_operators(ops: CpuOps, layers: list[DecoderLayer], world: World, steps: list[list[Piece]], x: Tensor) -> Tensor:
    """``x`` [length, HIDDEN] of sequence 0 through all layers, in steps."""
    s = world.shape
    cache = ops.allocate_kv(len(layers), world.num_blocks, world.block_size, s.num_kv_heads, s.head_size)
    out = []
    for pieces in steps:
        meta = metadata(world, pieces)
        rows = x[pieces[0].before : pieces[0].before + pieces[0].new].clone()
        for i, layer in enumerate(layers):
            qkv = ops.norm_linear(rows, layer.attention_norm, EPS, layer.qkv)
            norms = (layer.q_norm, layer.k_norm)
            ops.rope_write_kv(qkv, layer.cos_sin, cache, i, meta, layer.shape, *norms, norm_eps=EPS)
            ops.linear_add(ops.attention(qkv, cache, i, meta, layer.shape), layer.output, rows)
            ops.linear_add(
                ops.norm_gate_up(rows, layer.mlp_norm, EPS, layer.gate_up, layer.activation), layer.down, rows
            )
        out.append(rows)
    return torch.cat(out)


def in_one_call(ops: CpuOps, layers: list[DecoderLayer], world: World, steps: list[list[Piece]], x: Tensor) -> Tensor:
    s = world.shape
    cache = ops.allocate_kv(len(layers), world.num_blocks, world.block_size, s.num_kv_heads, s.head_size)
    packed, out = ops.pack_layers(layers), []
    for pieces in steps:
        rows = x[pieces[0].before : pieces[0].before + pieces[0].new].clone()
        ops.run_layers(rows, packed, cache, metadata(world, pieces))
        out.append(rows)
    return torch.cat(out)


def world_of(ops: CpuOps, length: int = 300) -> World:
    return make_world(AttentionShape(4, 2, 32, 0.2), [length], ops.activation_dtype, rotary_dim=32)


@each_target
@pytest.mark.parametrize("weight_format", FORMATS)
def test_one_call_gives_the_bits_of_the_operators(target: TargetName, weight_format: WeightFormat) -> None:
    ops = native_ops(weight_format, target=target)
    assert isinstance(ops, LayerOps)
    world = world_of(ops)
    layers = make_layers(ops, world, [None, 20, None], post_norms=False)
    x = torch.randn(300, HIDDEN, generator=torch.Generator().manual_seed(0))
    steps = [[Piece(0, 0, 290)], [Piece(0, 290, 8)], [Piece(0, 298, 1)], [Piece(0, 299, 1)]]
    assert torch.equal(in_one_call(ops, layers, world, steps, x), by_operators(ops, layers, world, steps, x))


@each_target
@pytest.mark.parametrize("weight_format", FORMATS)
def test_chunks_and_threads_change_no_bit_with_norms_after_each_half(
    target: TargetName, weight_format: WeightFormat
) -> None:
    x = torch.randn(300, HIDDEN, generator=torch.Generator().manual_seed(0))
    results = []
    for threads, steps in (
        (1, [[Piece(0, 0, 300)]]),
        (3, [[Piece(0, 0, 77)], [Piece(0, 77, 222)], [Piece(0, 299, 1)]]),
    ):
        ops = native_ops(weight_format, threads, target)
        world = world_of(ops)
        layers = make_layers(ops, world, [None, 100], post_norms=True)
        results.append(in_one_call(ops, layers, world, steps, x))
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])


def test_scratch_does_not_grow_while_threads_share_it() -> None:
    """Nor where the one linear layer that is wider than the others needs none: its activations are read as they are."""
    ops = native_ops("bf16", num_threads=8)
    world = world_of(ops, 2)
    layers = make_layers(ops, world, [None], post_norms=False, intermediate=4096)
    x = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(0))
    steps = [[Piece(0, 0, 1)], [Piece(0, 1, 1)]]
    want = by_operators(ops, layers, world, steps, x)
    for _ in range(50):
        with ThreadPoolExecutor(1) as new_thread:  # has no scratch yet
            assert torch.equal(new_thread.submit(in_one_call, ops, layers, world, steps, x).result(), want)


def test_norms_after_each_half_are_applied() -> None:
    ops = native_ops("fp32")
    world = world_of(ops, 5)
    (layer,) = make_layers(ops, world, [None], post_norms=True)
    x = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
    cache = ops.allocate_kv(1, world.num_blocks, 32, 2, 32)
    meta = metadata(world, [Piece(0, 0, 5)])
    want = x.clone()
    qkv = ops.norm_linear(want, layer.attention_norm, EPS, layer.qkv)
    ops.rope_write_kv(qkv, layer.cos_sin, cache, 0, meta, layer.shape, layer.q_norm, layer.k_norm, EPS)
    assert layer.after_attention_norm is not None
    assert layer.after_mlp_norm is not None
    attended = ops.linear(ops.attention(qkv, cache, 0, meta, layer.shape), layer.output)
    want += ops.norm(attended, layer.after_attention_norm, EPS)
    gated = ops.norm_gate_up(want, layer.mlp_norm, EPS, layer.gate_up, layer.activation)
    want += ops.norm(ops.linear(gated, layer.down), layer.after_mlp_norm, EPS)
    torch.testing.assert_close(in_one_call(ops, [layer], world, [[Piece(0, 0, 5)]], x), want)


def test_layers_of_different_sizes_are_refused() -> None:
    ops = native_ops("bf16")
    world = world_of(ops, 5)
    a, b = make_layers(ops, world, [None, None], post_norms=False)
    narrow = DecoderLayer(
        **{name: getattr(b, name) for name in DecoderLayer.__slots__ if name != "down"},
        down=ops.pack(DenseWeight(torch.zeros(HIDDEN, INTERMEDIATE + 1))),
    )
    with pytest.raises(ValueError, match="alike"):
        ops.pack_layers([a, narrow])


def test_a_cache_of_another_shape_is_refused() -> None:
    ops = native_ops("bf16")
    world = world_of(ops, 5)
    layers = make_layers(ops, world, [None, None], post_norms=False)
    meta = metadata(world, [Piece(0, 0, 5)])
    qkv = torch.zeros(5, 8 * 32, dtype=torch.bfloat16)
    for num_layers, kv_heads, head_size in ((1, 2, 32), (2, 1, 32), (2, 2, 64)):
        cache = ops.allocate_kv(num_layers, 4, 32, kv_heads, head_size)
        with pytest.raises(ValueError, match="not those of the cache"):
            ops.run_layers(torch.zeros(5, HIDDEN), ops.pack_layers(layers), cache, meta)
        if num_layers == 2:
            with pytest.raises(ValueError, match="not those of the cache"):
                ops.attention(qkv, cache, 0, meta, layers[0].shape)
