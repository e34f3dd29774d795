"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(
    # pointers
    x_ptr,
    weight_ptr,
    out_ptr,
    # sizes
    num_features,
    eps,
    # meta-parameters
    BLOCK: tl.constexpr,  # num_features rounded up to a power of two: a row is one program's work
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < num_features
    x = tl.load(x_ptr + row * num_features + i, mask=mask, other=0.0)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / num_features + eps)
    y = x * scale * tl.load(weight_ptr + i, mask=mask, other=0.0)
    tl.store(out_ptr + row * num_features + i, y.to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """fp32 [T, D] -> ``dtype`` [T, D]; weight fp32 [D]."""
    rows, features = x.shape
    out = torch.empty(rows, features, dtype=dtype, device=x.device)
    if rows:
        _rms_norm[(rows,)](x, weight, out, features, eps, BLOCK=triton.next_power_of_2(features))
    return out
