"""Linear layers of the native kernels in all weight formats."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_worker.kernels.build import TargetName
from engine_worker.kernels.ops import Activation, DenseWeight, QuantizedWeight, Weight
from engine_worker.kernels.packing import WeightFormat, convert, dequantize
from tests.unit.engine_worker.kernels.native import available_targets, each_target, native_ops, needs_native

pytestmark = needs_native

FORMATS = [f for f in get_args(WeightFormat) if f != "auto"]
SHAPES = [(960, 576), (70, 100), (1, 32), (33, 31), (48, 1)]  # N, K
# Against exact arithmetic on the weights as stored: rounding of activations and outputs only.
TOLERANCE = {"fp32": 1e-6, "bf16": 4e-3, "int8": 1.2e-2, "int4": 1.2e-2}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def random_dense(n: int, k: int, seed: int = 0) -> DenseWeight:
    return DenseWeight(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.05)


def as_stored(weight: Weight, weight_format: WeightFormat) -> Tensor:
    stored = convert(weight, weight_format)
    values = dequantize(stored) if isinstance(stored, QuantizedWeight) else stored.values.float()
    return values[:, : weight.values.shape[1]]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.float() - want).norm() / want.norm())


@each_target
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 64])
def test_linear_with_bias(target: TargetName, weight_format: WeightFormat, n: int, k: int, rows: int) -> None:
    ops = native_ops(weight_format, target=target)
    weight, bias = random_dense(n, k), torch.randn(n)
    x = torch.randn(rows, k).to(ops.activation_dtype)
    got = ops.linear(x, ops.pack(weight, bias))
    assert got.shape == (rows, n)
    assert got.dtype == ops.activation_dtype
    if rows:
        assert error(got, x.float() @ as_stored(weight, weight_format).t() + bias) < TOLERANCE[weight_format]


@each_target
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_norm_linear_and_logits(target: TargetName, weight_format: WeightFormat, n: int, k: int) -> None:
    ops = native_ops(weight_format, target=target)
    weight, x, norm = random_dense(n, k), torch.randn(5, k) * 3, torch.rand(k) + 0.5
    normed = nnf.rms_norm(x, (k,), norm, 1e-5)
    want = normed @ as_stored(weight, weight_format).t()
    assert error(ops.norm_linear(x, norm, 1e-5, ops.pack(weight)), want) < TOLERANCE[weight_format]
    assert error(ops.norm(x, norm, 1e-5), normed) < 1e-6
    head = ops.logits(x, norm, 1e-5, ops.pack_head(weight))
    head_format: WeightFormat = "int8" if weight_format == "int4" else weight_format
    assert head.dtype == torch.float32
    assert error(head, normed @ as_stored(weight, head_format).t()) < TOLERANCE[weight_format]


@each_target
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear_add_changes_the_residual_in_place(
    target: TargetName, weight_format: WeightFormat, n: int, k: int
) -> None:
    ops = native_ops(weight_format, target=target)
    weight = random_dense(n, k)
    x, residual = torch.randn(9, k).to(ops.activation_dtype), torch.randn(9, n)
    want = residual + x.float() @ as_stored(weight, weight_format).t()
    ops.linear_add(x, ops.pack(weight), residual)
    assert error(residual, want) < TOLERANCE[weight_format]


@each_target
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize(("n", "k"), [(96, 64), (50, 100), (1, 32)])
def test_gate_up(target: TargetName, weight_format: WeightFormat, activation: Activation, n: int, k: int) -> None:
    ops = native_ops(weight_format, target=target)
    gate, up = random_dense(n, k, 1), random_dense(n, k, 2)
    x, norm = torch.randn(20, k) * 4, torch.rand(k) + 0.5
    normed = nnf.rms_norm(x, (k,), norm, 1e-6)
    g, u = (normed @ as_stored(w, weight_format).t() for w in (gate, up))
    want = (nnf.silu(g) if activation is Activation.SILU else nnf.gelu(g, approximate="tanh")) * u
    got = ops.norm_gate_up(x, norm, 1e-6, ops.pack_gate_up(gate, up), activation)
    assert got.shape == (20, n)
    assert error(got, want) < 2 * TOLERANCE[weight_format]


@each_target
@pytest.mark.parametrize("weight_format", FORMATS)
@settings(max_examples=15)
@given(data=st.data())
def test_a_row_is_the_same_bits_in_any_batch_and_with_any_threads(
    target: TargetName, weight_format: WeightFormat, data: st.DataObject
) -> None:
    n, k = data.draw(st.sampled_from([(96, 64), (70, 100), (576, 1536), (33, 288)]))
    rows = data.draw(st.integers(1, 300))
    one = native_ops(weight_format, 1, target)
    many = native_ops(weight_format, data.draw(st.integers(1, 4)), target)
    weight = random_dense(n, k)
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    norm = torch.ones(k)
    batch = many.norm_linear(x, norm, 1e-5, many.pack(weight))
    packed = one.pack(weight)
    for start in data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=8)):
        count = data.draw(st.integers(1, 20))
        piece = x[start : start + count].contiguous()
        assert torch.equal(one.norm_linear(piece, norm, 1e-5, packed), batch[start : start + count])


@each_target
def test_rows_far_apart_in_size_and_rows_of_zeros(target: TargetName) -> None:
    ops = native_ops("int8", target=target)
    weight = random_dense(64, 96)
    x = torch.zeros(3, 96, dtype=torch.bfloat16)
    x[1] = 3e38
    x[2] = 1e-30
    got = ops.linear(x, ops.pack(weight))
    assert not got[0].any()
    assert got[2].isfinite().all()


@each_target
@pytest.mark.parametrize(("low", "high", "minimum"), [(-128, 127, None), (0, 15, -8.0), (0, 15, 0.0)])
def test_integer_sums_are_exact_at_their_largest(
    target: TargetName, low: int, high: int, minimum: float | None
) -> None:
    """AVX2 adds products in 16 bits, which saturate: the largest have to fit."""
    ones = torch.ones(64, 3, dtype=torch.half)
    values = torch.cat([torch.full((32, 96), low), torch.full((32, 96), high)])
    stored = values.to(torch.int8 if minimum is None else torch.uint8)
    weight = QuantizedWeight(stored, ones, None if minimum is None else ones * minimum)
    x = torch.ones(3, 96).bfloat16() * torch.tensor([[1], [-1], [0]])
    ops, got = native_ops("auto", target=target), torch.zeros(3, 64)
    ops.linear_add(x, ops.pack(weight), got)
    torch.testing.assert_close(got, x.float() @ (values + (minimum or 0.0)).t(), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_every_target_computes_the_same_bits_from_the_same_integers(weight_format: WeightFormat) -> None:
    weight, x = random_dense(100, 576), torch.randn(37, 576).bfloat16()
    results = [
        ops.linear(x, ops.pack(weight)) for ops in (native_ops(weight_format, target=t) for t in available_targets())
    ]
    assert all(torch.equal(results[0], other) for other in results)


def test_wrong_shapes_and_types_are_refused() -> None:
    ops = native_ops("bf16")
    linear = ops.pack(random_dense(32, 64))
    for bad in (torch.randn(2, 64), torch.randn(2, 63).bfloat16(), torch.randn(64, 2).bfloat16().t()):
        with pytest.raises(ValueError, match="expected contiguous"):
            ops.linear(bad, linear)
    with pytest.raises(ValueError, match="expected contiguous"):
        ops.linear_add(torch.randn(2, 64).bfloat16(), linear, torch.randn(2, 31))
    with pytest.raises(ValueError, match="same shape"):
        ops.pack_gate_up(random_dense(32, 64), random_dense(64, 64))
