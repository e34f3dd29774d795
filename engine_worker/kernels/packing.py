"""Weights in the layout of the native kernels, and the way into it: convert, quantise, pad, pack.

Rows (N) and columns (K) are padded with zeros to multiples of 32. Formats as native/linear.h names them; int4 whose
minimum is exactly -8 scales (GGUF's Q4_0) needs no minima and has a kind of its own.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad as pad_tensor

from engine_worker.kernels.memory import Arena
from engine_worker.kernels.ops import DenseWeight, QuantizedWeight, Weight

GROUP = 32  # values of K that share a scale, and columns of a tile

WeightFormat = Literal["auto", "fp32", "bf16", "int8", "int4"]


class Kind(IntEnum):
    """`Kind` of native/linear.h."""

    F32 = 0
    BF16 = 1
    INT8 = 2
    INT4 = 3
    INT4_SYMMETRIC = 4


_VALUE_BYTES: Final = {Kind.INT8: 1024, Kind.INT4: 512, Kind.INT4_SYMMETRIC: 512}  # of a group of 32 columns


class LinearStruct(ctypes.Structure):
    """`Linear` of native/linear.h."""

    _fields_ = (
        ("kind", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("padded_n", ctypes.c_int64),
        ("padded_k", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A packed layer: what the kernels read, and the tensors that keep it alive."""

    struct: LinearStruct
    address: int  # of struct
    values: Tensor  # dense: the values; quantised: uint8 [N / 32, K / 32, bytes of a group]
    bias: Tensor | None

    @property
    def kind(self) -> Kind:
        return Kind(self.struct.kind)


def convert(weight: Weight, weight_format: WeightFormat) -> Weight:
    """The weight in the format asked for. A quantised weight keeps its bits, unless a dense format is asked for.

    "auto" makes dense weights bf16. int8 and int4 quantise as GGUF's Q8_0 and Q4_1 do.
    """
    if weight_format in ("fp32", "bf16") or (weight_format == "auto" and isinstance(weight, DenseWeight)):
        dtype = torch.float32 if weight_format == "fp32" else torch.bfloat16
        values = weight.values if isinstance(weight, DenseWeight) else dequantize(weight)
        return DenseWeight(values.to(dtype))
    if isinstance(weight, QuantizedWeight):
        return weight
    return quantize_int8(weight.values) if weight_format == "int8" else quantize_int4(weight.values)


def dequantize(weight: QuantizedWeight) -> Tensor:
    """fp32 [N, K]."""
    n, k = weight.values.shape
    groups = weight.values.view(n, k // GROUP, GROUP).float() * weight.scales.float()[..., None]
    if weight.mins is not None:
        groups += weight.mins.float()[..., None]
    return groups.view(n, k)


def quantize_int8(values: Tensor) -> QuantizedWeight:
    """[N, K] -> groups of 32 with one scale, exactly as GGUF's Q8_0. K is padded to a multiple of 32."""
    groups = _in_groups(values)
    scale = groups.abs().amax(-1) / 127
    scaled = groups * torch.where(scale == 0, 0.0, 1 / scale)[..., None]
    rounded = torch.sign(scaled) * torch.floor(scaled.abs() + 0.5)
    return QuantizedWeight(rounded.to(torch.int8).flatten(1), scale.half(), None)


def quantize_int4(values: Tensor) -> QuantizedWeight:
    """[N, K] -> groups of 32 with scale and minimum, exactly as GGUF's Q4_1. K is padded to a multiple of 32."""
    groups = _in_groups(values)
    low = groups.amin(-1)
    scale = (groups.amax(-1) - low) / 15
    scaled = (groups - low[..., None]) * torch.where(scale == 0, 0.0, 1 / scale)[..., None]
    rounded = (scaled + 0.5).floor().clamp(0, 15).to(torch.uint8)
    return QuantizedWeight(rounded.flatten(1), scale.half(), low.half())


def interleave(gate: Weight, up: Weight) -> Weight:
    """Rows so that each 32 of them are 16 of gate and the same 16 of up; padded with zero rows to whole tiles.

    Raises ValueError where the two differ in shape or format.
    """
    if isinstance(gate, DenseWeight) and isinstance(up, DenseWeight):
        return DenseWeight(_interleave_rows(gate.values, up.values))
    if isinstance(gate, QuantizedWeight) and isinstance(up, QuantizedWeight):
        values, scales = _interleave_rows(gate.values, up.values), _interleave_rows(gate.scales, up.scales)
        if gate.mins is None and up.mins is None:
            return QuantizedWeight(values, scales, None)
        if gate.mins is not None and up.mins is not None:
            return QuantizedWeight(values, scales, _interleave_rows(gate.mins, up.mins))
    raise ValueError("gate and up must have the same format")


def pack(weight: Weight, n: int, k: int, bias: Tensor | None, arena: Arena) -> NativeLinear:
    """Pack a converted weight. ``n`` and ``k`` are the model's sizes; the weight may be padded beyond them.

    Raises ValueError for a dense weight that is neither fp32 nor bf16.
    """
    rows = _round_up(weight.values.shape[0], GROUP)
    columns = _round_up(weight.values.shape[1], GROUP)
    if isinstance(weight, DenseWeight):
        kind, packed = _pack_dense(_pad(weight.values, rows, columns))
    else:
        kind = _quantized_kind(weight)
        packed = _pack_quantized(weight, kind, rows)
    values = arena.empty(tuple(packed.shape), packed.dtype).copy_(packed)
    padded_bias = None if bias is None else pad_tensor(bias.float(), (0, rows - bias.shape[0])).contiguous()
    bias_address = None if padded_bias is None else padded_bias.data_ptr()
    struct = LinearStruct(kind, n, k, rows, columns, values.data_ptr(), bias_address)
    return NativeLinear(struct, ctypes.addressof(struct), values, padded_bias)


def unpack(linear: NativeLinear) -> Weight:
    """The weight as it was before `pack`, without its padding of N and K (quantised: K padded to whole groups)."""
    s, kind = linear.struct, linear.kind
    tiles, k = s.padded_n // GROUP, s.padded_k
    if kind in (Kind.F32, Kind.BF16):
        pair = 1 if kind is Kind.F32 else 2
        values = linear.values.view(tiles, k // pair, GROUP, pair).transpose(1, 2).reshape(s.padded_n, k)
        return DenseWeight(values[: s.n, : s.k].contiguous())
    num_bytes = _VALUE_BYTES[kind]
    stored, scales = linear.values[..., :num_bytes], _unpack_halves(linear.values[..., num_bytes : num_bytes + 64])
    if kind is Kind.INT8:
        quads = stored.reshape(tiles, k // 4, GROUP, 4).transpose(1, 2).reshape(s.padded_n, k)
        return QuantizedWeight((quads.short() - 128).to(torch.int8)[: s.n], scales[: s.n], None)
    packed = stored.reshape(tiles, k // GROUP, 4, GROUP, 4)
    nibbles = torch.stack([packed & 15, packed >> 4], 2)  # [tile, group, half, quad, column, 4]
    values = nibbles.permute(0, 4, 1, 2, 3, 5).reshape(s.padded_n, k)[: s.n].contiguous()
    mins = -8 * scales if kind is Kind.INT4_SYMMETRIC else _unpack_halves(linear.values[..., num_bytes + 64 :])
    return QuantizedWeight(values, scales[: s.n], mins[: s.n])


def _quantized_kind(weight: QuantizedWeight) -> Kind:
    if weight.mins is None:
        return Kind.INT8
    return Kind.INT4_SYMMETRIC if torch.equal(weight.mins, -8 * weight.scales) else Kind.INT4


def _pack_dense(w: Tensor) -> tuple[Kind, Tensor]:
    n, k = w.shape
    if w.dtype == torch.float32:
        return Kind.F32, w.view(n // GROUP, GROUP, k).transpose(1, 2)
    if w.dtype == torch.bfloat16:
        return Kind.BF16, w.view(n // GROUP, GROUP, k // 2, 2).transpose(1, 2)
    raise ValueError(f"dense weights must be fp32 or bf16, not {w.dtype}")


def _pack_quantized(weight: QuantizedWeight, kind: Kind, rows: int) -> Tensor:
    """uint8 [tiles, groups, bytes]: a group's values, scales and, where they are kept, minima."""
    values = _pack_int8(weight, rows) if kind is Kind.INT8 else _pack_int4(weight, rows)
    parts = [values.reshape(*values.shape[:1], -1, _VALUE_BYTES[kind]), _pack_halves(weight.scales, rows)]
    if kind is Kind.INT4 and weight.mins is not None:
        parts.append(_pack_halves(weight.mins, rows))
    return torch.cat(parts, 2)


def _pack_int8(weight: QuantizedWeight, rows: int) -> Tensor:
    k = weight.values.shape[1]
    stored = (_pad(weight.values, rows, k).short() + 128).to(torch.uint8)  # unsigned for the dot product instruction
    return stored.view(rows // GROUP, GROUP, k // 4, 4).transpose(1, 2)


def _pack_int4(weight: QuantizedWeight, rows: int) -> Tensor:
    k = weight.values.shape[1]
    halves = _pad(weight.values, rows, k).view(rows // GROUP, GROUP, k // GROUP, 2, 4, 4).permute(3, 0, 2, 4, 1, 5)
    return halves[0] | (halves[1] << 4)


def _pack_halves(t: Tensor, rows: int) -> Tensor:
    """fp16 [N, groups] -> uint8 [tiles, groups, 64]."""
    tiles = _pad(t.half(), rows, t.shape[1]).view(rows // GROUP, GROUP, t.shape[1]).transpose(1, 2).contiguous()
    return tiles.view(torch.uint8)


def _unpack_halves(t: Tensor) -> Tensor:
    tiles, groups, _ = t.shape
    return t.contiguous().view(torch.float16).transpose(1, 2).reshape(tiles * GROUP, groups)


def _in_groups(values: Tensor) -> Tensor:
    n, k = values.shape
    return _pad(values.float(), n, _round_up(k, GROUP)).view(n, -1, GROUP)


def _interleave_rows(gate: Tensor, up: Tensor) -> Tensor:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        shapes = f"gate ({gate.dtype} {tuple(gate.shape)}) and up ({up.dtype} {tuple(up.shape)})"
        raise ValueError(f"{shapes} must have the same shape and type")
    n, k = gate.shape
    rows = _round_up(n, GROUP // 2)
    halves = [_pad(t, rows, k).view(-1, GROUP // 2, k) for t in (gate, up)]
    return torch.stack(halves, 1).view(2 * rows, k)


def _pad(t: Tensor, rows: int, columns: int) -> Tensor:
    return pad_tensor(t, (0, columns - t.shape[1], 0, rows - t.shape[0])).contiguous()


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
