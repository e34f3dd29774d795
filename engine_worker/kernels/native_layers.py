"""Decoder layers as the native kernels read them: one array of structures for `headrace_layers`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from engine_worker.kernels.kv_quantization import KvFormat
from engine_worker.kernels.native_types import Epilogue, LayerStruct, RopeStruct, ShapeStruct, f32_address
from engine_worker.kernels.ops import Activation, DecoderLayer

GATED: Final = {Activation.SILU: Epilogue.SILU_MUL, Activation.GELU_TANH: Epilogue.GELU_MUL}


@dataclass(slots=True)
class NativeLayers:
    """The layers' structures and the tensors that keep them alive."""

    structs: ctypes.Array[LayerStruct]
    layers: tuple[DecoderLayer, ...]
    block_size: int = 0  # of the cache last used: the structures name it

    @property
    def width(self) -> int:
        """Of the residual stream."""
        return self.layers[0].qkv.k

    def use_block_size(self, block_size: int) -> None:
        if block_size != self.block_size:
            for struct in self.structs:
                struct.shape.block_size = block_size
            self.block_size = block_size


def native_layers(layers: Sequence[DecoderLayer], kv_format: KvFormat) -> NativeLayers:
    """Raises ValueError if the layers differ in their sizes, or a norm or the rotary table is not contiguous fp32."""
    if len({_sizes(layer) for layer in layers}) != 1:
        raise ValueError("the layers must be alike in their sizes")
    structs = (LayerStruct * len(layers))(*(_layer_struct(layer, kv_format) for layer in layers))
    return NativeLayers(structs, tuple(layers))


def _sizes(layer: DecoderLayer) -> tuple[int, ...]:
    linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
    shape = layer.shape
    return (shape.num_heads, shape.num_kv_heads, shape.head_size, *(size for w in linears for size in (w.n, w.k)))


def _layer_struct(layer: DecoderLayer, kv_format: KvFormat) -> LayerStruct:
    rope = RopeStruct(
        f32_address(layer.cos_sin), layer.cos_sin.shape[1], _norm(layer.q_norm), _norm(layer.k_norm), layer.norm_eps
    )
    return LayerStruct(
        ShapeStruct.of(layer.shape, 0, kv_format),
        rope,
        *(linear.storage.address for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)),
        _norm(layer.attention_norm),
        _norm(layer.mlp_norm),
        _norm(layer.after_attention_norm),
        _norm(layer.after_mlp_norm),
        layer.norm_eps,
        GATED[layer.activation],
    )


def _norm(weight: Tensor | None) -> int | None:
    return None if weight is None else f32_address(weight)
