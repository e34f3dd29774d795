"""Keys and values as int8: one scale for each token and KV head, from that token alone.

    scale = max(abs(x)) / 127, rounded up to bfloat16        x ~ scale * v, v = round(x / scale) in -127..127

Rounded up, so that no value leaves the range: two bytes of scale then lose nothing against four. A token's bytes depend
on nothing but its own keys and values, so whoever computes it again, or finds it in a shared block, has the same.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

KvFormat = Literal["activations", "int8"]  # activations: in the dtype that is computed in

_SMALLEST: Final = 1e-30  # of the largest value: zeros get a scale, too, and nobody divides by one that is none


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., HD] -> int8 [..., HD], bf16 [...]."""
    wide = x.float()
    scales = _round_up(wide.abs().amax(-1).clamp_min(_SMALLEST) / 127)
    values = (wide * (1 / scales.float())[..., None]).round().to(torch.int8)
    return values, scales


def dequantize_heads(values: Tensor, scales: Tensor) -> Tensor:
    """fp32 [..., HD]: exact, 7 bits times 8."""
    return values.float() * scales.float()[..., None]


def _round_up(positive: Tensor) -> Tensor:
    """fp32 -> bf16, away from zero."""
    return ((positive.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
