"""act(gate) * up, the middle of a gated MLP (Shazeer, 2020); act is SiLU or the tanh form of GELU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine_worker.kernels.ops import Activation

_BLOCK = 1024


@triton.jit
def _gated_activation(
    # pointers
    gate_up_ptr,
    out_ptr,
    # sizes
    num_features,
    # meta-parameters
    IS_GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_features
    gate = tl.load(gate_up_ptr + row * 2 * num_features + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * num_features + num_features + i, mask=mask, other=0.0).to(tl.float32)
    if IS_GELU:
        # 0.5 (1 + tanh(z)) = sigmoid(2 z), with z = sqrt(2 / pi) (x + 0.044715 x^3)
        act = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        act = gate * tl.sigmoid(gate)
    tl.store(out_ptr + row * num_features + i, (act * up).to(out_ptr.dtype.element_ty), mask=mask)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """[T, 2 I] (gate | up) -> [T, I] of the same dtype."""
    rows, width = gate_up.shape
    features = width // 2
    out = torch.empty(rows, features, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _gated_activation[(rows, triton.cdiv(features, _BLOCK))](
            gate_up, out, features, IS_GELU=activation is Activation.GELU_TANH, BLOCK=_BLOCK
        )
    return out
