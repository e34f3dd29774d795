"""Few rows of an embedding are those of many, bit for bit, in every format."""

from __future__ import annotations

import pytest
import torch

from engine_worker.kernels.ops import DenseWeight, Weight
from engine_worker.kernels.packing import quantize_int4, quantize_int8
from engine_worker.models.layers import Embedding

_VALUES = torch.randn(50, 96, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "weight",
    [
        DenseWeight(_VALUES),
        DenseWeight(_VALUES.bfloat16()),
        DenseWeight(_VALUES.half()),
        quantize_int8(_VALUES),
        quantize_int4(_VALUES),
    ],
    ids=["fp32", "bf16", "fp16", "int8", "int4"],
)
@pytest.mark.parametrize("scale", [1.0, 9.5])
def test_rows_do_not_depend_on_how_many_are_asked_for(weight: Weight, scale: float) -> None:
    embedding = Embedding(weight, scale, torch.device("cpu"))
    token_ids = torch.arange(200, dtype=torch.int32) % 50
    many = embedding(token_ids)
    assert many.dtype is torch.float32
    for count in (1, 2, 7, 50):
        few = embedding(token_ids[:count])
        assert few.is_contiguous()
        assert torch.equal(few.view(torch.int32), many[:count].view(torch.int32))
