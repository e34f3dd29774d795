"""Keys and values as int8: what is stored, and attention over it, in plain torch and by the native kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_worker.kernels.build import TargetName
from engine_worker.kernels.cpu import CpuOps
from engine_worker.kernels.kv_quantization import dequantize_heads, quantize_heads
from engine_worker.kernels.ops import AttentionShape
from engine_worker.kernels.ops_torch import TorchOps
from engine_worker.kernels.packing import WeightFormat
from tests.unit.engine_worker.kernels.batches import Piece, World, expected_attention, make_world, metadata, tokens
from tests.unit.engine_worker.kernels.native import each_target, native_ops, needs_native
from tests.unit.engine_worker.kernels.test_cpu_attention import error, run_steps, whole

DENSE: Final[tuple[WeightFormat, ...]] = ("fp32", "bf16")
# Against attention over the same bytes. Queries and weights have 15 bits; a key may be rounded the other way where the
# rotation's last bit differs.
TOLERANCE: Final = {torch.float32: 2e-4, torch.bfloat16: 9e-3}


def int8_ops(weight_format: WeightFormat, target: TargetName, num_threads: int = 2) -> CpuOps:
    return native_ops(weight_format, num_threads, target, "int8")


def torch_int8(world: World, q_norm: Tensor | None = None, k_norm: Tensor | None = None) -> dict[int, Tensor]:
    """By plain torch in fp32, from the same activations."""
    wide = replace(world, qkv=[x.float() for x in world.qkv])
    return run_steps(TorchOps(torch.float32, kv_format="int8"), wide, whole(wide), q_norm, k_norm)


@given(data=st.data())
def test_quantised_heads_are_within_half_a_step_and_never_out_of_range(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from([4, 64, 80]))
    x = torch.randn(50, 3, size, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    x *= 10.0 ** data.draw(st.integers(-20, 20))
    values, scales = quantize_heads(x)
    assert values.abs().max() == 127
    step = scales.float()[..., None]
    assert ((dequantize_heads(values, scales) - x).abs() <= step * 0.501).all()
    largest = x.abs().amax(-1) / 127
    assert (scales.float() >= largest).all()
    assert (scales.float() <= largest * 1.008).all()  # rounded up to 8 bits


def test_zeros_stay_zeros() -> None:
    values, scales = quantize_heads(torch.zeros(2, 64))
    assert not values.any()
    assert dequantize_heads(values, scales).eq(0).all()


def test_plain_torch_loses_about_a_hundredth() -> None:
    shape = AttentionShape(4, 2, 64, 0.125)
    world = make_world(shape, [1, 33, 300], torch.float32, rotary_dim=64)
    for sequence, got in torch_int8(world).items():
        assert 1e-4 < error(got, expected_attention(world, sequence)) < 2e-2


@needs_native
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
        (3, 3, 20, 20, 32),
        (14, 2, 4, 4, 32),
    ],
)
def test_native_equals_plain_torch_over_the_same_bytes(
    target: TargetName,
    weight_format: WeightFormat,
    heads: int,
    kv_heads: int,
    head_size: int,
    rotary_dim: int,
    block_size: int,
) -> None:
    ops = int8_ops(weight_format, target)
    shape = AttentionShape(heads, kv_heads, head_size, head_size**-0.5)
    world = make_world(shape, [1, 33, 300], ops.activation_dtype, block_size=block_size, rotary_dim=rotary_dim)
    expected = torch_int8(world)
    for sequence, got in run_steps(ops, world, whole(world)).items():
        assert error(got, expected[sequence]) < TOLERANCE[ops.activation_dtype]


@needs_native
@each_target
def test_a_value_is_read_as_plain_torch_stores_it(target: TargetName) -> None:
    shape = AttentionShape(4, 2, 64, 0.125)
    world = make_world(shape, [1] * 40, torch.float32, rotary_dim=64)
    got = run_steps(int8_ops("fp32", target), world, whole(world))
    for sequence, x in enumerate(world.qkv):  # who sees one token gets its value
        value = dequantize_heads(*quantize_heads(x.view(8, 64)[6:])).repeat_interleave(2, 0).flatten()
        torch.testing.assert_close(got[sequence][0], value, rtol=1e-6, atol=0)


@needs_native
@each_target
@pytest.mark.parametrize("window", [1, 17, 256, 300])
def test_sliding_window(target: TargetName, window: int) -> None:
    shape = AttentionShape(4, 2, 64, 0.125, sliding_window=window)
    world = make_world(shape, [700, 40], torch.float32, rotary_dim=64)
    expected = torch_int8(world)
    for sequence, got in run_steps(int8_ops("fp32", target), world, whole(world)).items():
        assert error(got, expected[sequence]) < TOLERANCE[torch.float32]


@needs_native
@each_target
def test_soft_cap_and_head_norms(target: TargetName) -> None:
    shape = AttentionShape(4, 2, 64, 1.0, soft_cap=5.0)
    world = make_world(shape, [90], torch.float32, rotary_dim=40)
    norms = torch.rand(64) + 0.5, torch.rand(64) + 0.5
    got = run_steps(int8_ops("fp32", target), world, whole(world), *norms)[0]
    assert error(got, torch_int8(world, *norms)[0]) < 5 * TOLERANCE[torch.float32]


@needs_native
@each_target
@settings(max_examples=25)
@given(data=st.data())
def test_a_token_is_the_same_bits_in_any_batch_any_chunks_and_any_threads(
    target: TargetName, data: st.DataObject
) -> None:
    weight_format: WeightFormat = data.draw(st.sampled_from(DENSE))
    window = data.draw(st.sampled_from([None, 5, 100, 400]))
    lengths = data.draw(st.lists(st.integers(1, 600), min_size=1, max_size=4))
    ops = int8_ops(weight_format, target, 1)
    shape = AttentionShape(6, 2, 64, 0.125, sliding_window=window)
    world = make_world(shape, lengths, ops.activation_dtype, rotary_dim=64, seed=data.draw(st.integers(0, 99)))
    alone = {i: run_steps(ops, world, [[Piece(i, 0, n)]])[i] for i, n in enumerate(lengths)}

    done = [0] * len(lengths)
    steps: list[list[Piece]] = []
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        waiting = [i for i, n in enumerate(lengths) if done[i] < n]
        step = []
        for i in data.draw(st.permutations(waiting))[: data.draw(st.integers(1, len(waiting)))]:
            new = min(lengths[i] - done[i], data.draw(st.sampled_from([1, 1, 2, 31, 64, 200, 600])))
            step.append(Piece(i, done[i], new))
            done[i] += new
        steps.append(step)
    batched = run_steps(int8_ops(weight_format, target, data.draw(st.integers(1, 4))), world, steps)
    assert all(torch.equal(alone[i], batched[i]) for i in alone)


@needs_native
@each_target
def test_a_long_context_is_shared_out_over_threads_without_changing_a_bit(target: TargetName) -> None:
    world = make_world(AttentionShape(3, 1, 64, 0.125), [3000], torch.bfloat16, rotary_dim=64)
    steps = [[Piece(0, 0, 2999)], [Piece(0, 2999, 1)]]
    results = [run_steps(int8_ops("bf16", target, threads), world, steps)[0] for threads in (1, 2, 3)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_native
@each_target
def test_what_a_former_owner_left_in_a_block_does_no_harm(target: TargetName) -> None:
    ops = int8_ops("bf16", target)
    shape = AttentionShape(3, 1, 64, 0.125)
    world = make_world(shape, [40], torch.bfloat16, rotary_dim=64)
    clean = run_steps(ops, world, whole(world))[0]
    cache = ops.allocate_kv(1, world.num_blocks, 32, 1, 64)
    for value in (float("nan"), float("inf")):
        spoiled = replace(world, qkv=[torch.full((64, 5 * 64), value).bfloat16()])
        pieces = [Piece(0, 0, 64)]
        angles = torch.cat([world.cos_sin] * 2)
        ops.rope_write_kv(tokens(spoiled, pieces), angles, cache, 0, metadata(spoiled, pieces), shape)
        pieces = [Piece(0, 0, 40)]
        qkv, meta = tokens(world, pieces), metadata(world, pieces)
        ops.rope_write_kv(qkv, world.cos_sin, cache, 0, meta, shape)
        assert torch.equal(ops.attention(qkv, cache, 0, meta, shape), clean)


@needs_native
def test_bytes_per_block_are_what_the_cache_takes_and_about_half() -> None:
    ops = native_ops("bf16", kv_format="int8")
    cache = ops.allocate_kv(3, 7, 32, 2, 64)
    assert cache.memory.numel() == 7 * ops.kv_bytes_per_block(3, 32, 2, 64)
    assert ops.kv_bytes_per_block(3, 32, 2, 64) / native_ops("bf16").kv_bytes_per_block(3, 32, 2, 64) == 66 / 128
    cache.memory.fill_(1)
    cache.clear([2, 5])
    assert cache.memory.view(3, 2, 7, -1).sum((0, 1, 3)).bool().tolist() == [True, True, False, True, True, False, True]


@needs_native
def test_head_sizes_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 4, not 70"):
        native_ops("bf16", kv_format="int8").allocate_kv(1, 4, 32, 2, 70)


@pytest.mark.parametrize("kv_format", ["activations", "int8"])
def test_plain_torch_takes_the_bytes_it_names_and_clears_blocks(kv_format: str) -> None:
    ops = TorchOps(torch.float32, kv_format="int8" if kv_format == "int8" else "activations")
    cache = ops.allocate_kv(2, 5, 16, 3, 8)
    assert sum(part.nbytes for part in cache.tensors()) == 5 * ops.kv_bytes_per_block(2, 16, 3, 8)
    for part in cache.tensors():
        part.fill_(1)
    cache.clear([1, 3])
    for part in cache.tensors():
        assert part.flatten(1).float().sum(1).bool().tolist() == [True, False, True, False, True]
