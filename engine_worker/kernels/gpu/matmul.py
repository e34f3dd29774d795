"""Matrix products whose every row has one order of sums, however many rows there are.

cuBLAS picks a kernel, and with it an order, by the number of rows. Here the tile is the same for all of them and nobody
splits K: a row's result depends on that row and the weights alone. What that costs is padding at small batches, where
the time goes into reading the weights anyhow, and tiles smaller than the best at large ones.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_worker.kernels.gpu.launch import needs_upcast

_BLOCK_M: Final = 32
_BLOCK_N: Final = 64
_BLOCK_K: Final = 64


@triton.jit
def _matmul(
    # pointers
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    # sizes
    num_rows,
    num_features,
    width,
    # strides
    x_stride,
    # meta-parameters
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # Programs of the same features are neighbours: they read the same weights.
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    feature = (tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, width, BLOCK_K):
        at = start + k
        x = tl.load(
            x_ptr + row[:, None] * x_stride + at[None, :],
            mask=(row[:, None] < num_rows) & (at[None, :] < width),
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + feature[None, :] * width + at[:, None],
            mask=(feature[None, :] < num_features) & (at[:, None] < width),
            other=0.0,
        )
        if UPCAST:
            x = x.to(tl.float32)
            weight = weight.to(tl.float32)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias_ptr + feature, mask=feature < num_features, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + row[:, None] * num_features + feature[None, :]
    tl.store(
        out,
        total.to(out_ptr.dtype.element_ty),
        mask=(row[:, None] < num_rows) & (feature[None, :] < num_features),
    )


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[M, K] -> [M, N] in the dtype of ``x``; weight [N, K] contiguous, bias [N]. Sums are fp32."""
    rows, width = x.shape
    features = weight.shape[0]
    out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    if rows:
        _matmul[(triton.cdiv(rows, _BLOCK_M), triton.cdiv(features, _BLOCK_N))](
            x,
            weight,
            weight if bias is None else bias,
            out,
            rows,
            features,
            width,
            x.stride(0),
            BLOCK_M=_BLOCK_M,
            BLOCK_N=_BLOCK_N,
            BLOCK_K=_BLOCK_K,
            HAS_BIAS=bias is not None,
            UPCAST=needs_upcast(x.dtype),
        )
    return out
