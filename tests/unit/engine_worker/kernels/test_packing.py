"""Weights survive packing bit for bit, and quantising is GGUF's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine_worker.kernels.memory import Arena
from engine_worker.kernels.ops import DenseWeight, QuantizedWeight, Weight
from engine_worker.kernels.packing import (
    Kind,
    convert,
    dequantize,
    interleave,
    pack,
    quantize_int4,
    quantize_int8,
    unpack,
)


def scales(n: int, groups: int, seed: int = 0) -> Tensor:
    return torch.randn(n, groups, generator=torch.Generator().manual_seed(seed)).half()


def int8_weight(n: int, k: int) -> QuantizedWeight:
    return QuantizedWeight(torch.randint(-127, 128, (n, k), dtype=torch.int8), scales(n, k // 32), None)


def int4_weight(n: int, k: int, *, symmetric: bool) -> QuantizedWeight:
    scale = scales(n, k // 32)
    values = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    return QuantizedWeight(values, scale, -8 * scale if symmetric else scales(n, k // 32, 1))


@given(n=st.integers(1, 100), groups=st.integers(1, 5))
def test_unpacking_gives_back_the_bits(n: int, groups: int) -> None:
    k = groups * 32
    cases: list[tuple[Weight, Kind]] = [
        (DenseWeight(torch.randn(n, k)), Kind.F32),
        (DenseWeight(torch.randn(n, k).bfloat16()), Kind.BF16),
        (int8_weight(n, k), Kind.INT8),
        (int4_weight(n, k, symmetric=False), Kind.INT4),
        (int4_weight(n, k, symmetric=True), Kind.INT4_SYMMETRIC),
    ]
    for weight, kind in cases:
        linear = pack(weight, n, k, None, Arena())
        assert linear.kind is kind
        back = unpack(linear)
        assert torch.equal(back.values, weight.values)
        if isinstance(weight, QuantizedWeight) and isinstance(back, QuantizedWeight):
            assert torch.equal(back.scales, weight.scales)
            assert (back.mins is None) == (weight.mins is None)
            assert weight.mins is None or (back.mins is not None and torch.equal(back.mins, weight.mins))


@pytest.mark.parametrize("k", [1, 31, 33, 100])
def test_k_is_padded(k: int) -> None:
    values = torch.randn(40, k)
    assert torch.equal(unpack(pack(DenseWeight(values), 40, k, None, Arena())).values, values)


@pytest.mark.parametrize(("quantize", "kind"), [(quantize_int8, "Q8_0"), (quantize_int4, "Q4_1")])
def test_quantising_is_bit_for_bit_that_of_gguf(quantize: Callable[[Tensor], QuantizedWeight], kind: str) -> None:
    values = torch.randn(37, 96) * torch.logspace(-3, 2, 37)[:, None]
    values[3] = 0
    want = quants.dequantize(quants.quantize(values.numpy(), GGMLQuantizationType[kind]), GGMLQuantizationType[kind])
    np.testing.assert_array_equal(dequantize(quantize(values)).numpy(), want)


def test_converting_keeps_quantised_bits_unless_dense_is_asked_for() -> None:
    weight = int4_weight(8, 64, symmetric=False)
    for weight_format in ("auto", "int8", "int4"):
        assert convert(weight, weight_format) is weight
    dense = convert(weight, "fp32")
    assert torch.equal(dense.values, dequantize(weight))
    assert convert(DenseWeight(torch.randn(2, 32).half()), "auto").values.dtype == torch.bfloat16


def test_gate_and_up_alternate_in_runs_of_sixteen_rows() -> None:
    gate, up = DenseWeight(torch.full((20, 4), 1.0)), DenseWeight(torch.full((20, 4), 2.0))
    rows = interleave(gate, up).values[:, 0]
    assert rows.tolist() == [1.0] * 16 + [2.0] * 16 + [1.0] * 4 + [0.0] * 12 + [2.0] * 4 + [0.0] * 12


def test_gate_and_up_of_different_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="same"):
        interleave(int8_weight(16, 32), int4_weight(16, 32, symmetric=True))


def test_a_dense_type_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        pack(DenseWeight(torch.zeros(32, 32).half()), 32, 32, None, Arena())


def test_the_arena_hands_out_disjoint_aligned_memory() -> None:
    arena = Arena(chunk_bytes=1 << 16)
    tensors = [arena.empty((n,), torch.int16) for n in (1, 100, 20_000, 5000, 30_000, 7)]
    for i, t in enumerate(tensors):
        t.fill_(i)
    assert all((t == i).all() for i, t in enumerate(tensors))
    assert all(t.data_ptr() % 64 == 0 for t in tensors)
