"""The C interface of native/cpu.cpp as ctypes sees it: structures (same fields, same order) and functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Self

import torch
from torch import Tensor

from engine_worker.kernels.kv_quantization import KvFormat
from engine_worker.kernels.ops import AttentionMetadata, AttentionShape

ADDRESS: Final = ctypes.addressof
P, I64, F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def f32_address(t: Tensor) -> int:
    """Address of a contiguous fp32 tensor. Raises ValueError for any other."""
    if t.dtype is not torch.float32 or not t.is_contiguous():
        raise ValueError(f"expected contiguous fp32, got {t.dtype} with strides {t.stride()}")
    return t.data_ptr()


class Epilogue(IntEnum):
    """`Epilogue` of native/linear.h: what becomes of a linear layer's result."""

    STORE = 0
    STORE_F32 = 1
    ADD = 2
    SILU_MUL = 3
    GELU_MUL = 4


class ShapeStruct(ctypes.Structure):
    """`Shape` of native/attention.h."""

    _fields_ = (
        ("heads", I64),
        ("kv_heads", I64),
        ("head_size", I64),
        ("block_size", I64),
        ("window", I64),
        ("is_int8", I64),
        ("scale", F32),
        ("cap", F32),
    )

    @classmethod
    def of(cls, shape: AttentionShape, block_size: int, kv_format: KvFormat) -> Self:
        if shape.num_heads % shape.num_kv_heads:
            raise ValueError(f"{shape.num_heads} heads are not a multiple of {shape.num_kv_heads} KV heads")
        return cls(
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_size,
            block_size,
            shape.sliding_window or 0,
            int(kv_format == "int8"),
            shape.scale,
            shape.soft_cap or 0.0,
        )


class StepStruct(ctypes.Structure):
    """`Step` of native/attention.h. The metadata it was made of must outlive it."""

    _fields_ = (
        ("sequences", I64),
        ("tokens", I64),
        ("query_start", P),
        ("seq_lens", P),
        ("rows", P),
        ("tables", P),
        ("table_stride", I64),
        ("slots", P),
        ("positions", P),
    )

    @classmethod
    def of(cls, meta: AttentionMetadata) -> Self:
        for t in (meta.query_start, meta.seq_lens, meta.block_table_rows, meta.slot_mapping, meta.positions):
            if t.dtype is not torch.int32 or not t.is_contiguous():
                raise ValueError(f"attention metadata must be contiguous int32, got {t.dtype}")
        return cls(
            len(meta.seq_lens),
            len(meta.positions),
            meta.query_start.data_ptr(),
            meta.seq_lens.data_ptr(),
            meta.block_table_rows.data_ptr(),
            meta.block_tables.data_ptr(),
            meta.block_tables.stride(0),
            meta.slot_mapping.data_ptr(),
            meta.positions.data_ptr(),
        )


class RopeStruct(ctypes.Structure):
    """`Rope` of native/attention.h."""

    _fields_ = (("cos_sin", P), ("dim", I64), ("q_norm", P), ("k_norm", P), ("eps", F32))


class LayerStruct(ctypes.Structure):
    """`Layer` of native/layers.h."""

    _fields_ = (
        ("shape", ShapeStruct),
        ("rope", RopeStruct),
        ("qkv", P),
        ("output", P),
        ("gate_up", P),
        ("down", P),
        ("attention_norm", P),
        ("mlp_norm", P),
        ("after_attention", P),
        ("after_mlp", P),
        ("eps", F32),
        ("activation", I64),
    )


@dataclass(frozen=True, slots=True)
class NativeFunctions:
    """The exported functions; the GIL is released while they run."""

    linear: Callable[..., None]
    norm: Callable[..., None]
    rope_write: Callable[..., None]
    attention: Callable[..., None]
    layers: Callable[..., float]  # seconds it took


def declare_functions(library: ctypes.CDLL) -> NativeFunctions:
    """The library's functions with their argument types."""

    def function(name: str, *types: Any, result: Any = None) -> Callable[..., Any]:
        f = library[name]
        f.argtypes, f.restype = types, result
        return f

    return NativeFunctions(
        linear=function("headrace_linear", P, P, P, F32, I64, P, I64, I64, I64),
        norm=function("headrace_norm", P, P, F32, I64, I64, P),
        rope_write=function("headrace_rope_write", P, P, P, P, P, P, I64, I64),
        attention=function("headrace_attention", P, P, P, P, P, P, I64, I64),
        layers=function("headrace_layers", P, I64, P, P, P, P, I64, I64, I64, result=ctypes.c_double),
    )
