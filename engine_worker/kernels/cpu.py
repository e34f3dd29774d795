"""`Ops` by the native CPU kernels (native/cpu.cpp), called through ctypes.

The result of a token is bit for bit the same alone or in a batch, in one prefill or in chunks, with one thread or many.
Not safe for use by two threads at once: the engine thread owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from engine_worker.kernels import packing
from engine_worker.kernels.build import BuildSettings, choose_target, load
from engine_worker.kernels.kv_quantization import KvFormat
from engine_worker.kernels.memory import Arena, map_bytes
from engine_worker.kernels.native_layers import GATED, NativeLayers, native_layers
from engine_worker.kernels.native_types import (
    ADDRESS,
    Epilogue,
    RopeStruct,
    ShapeStruct,
    StepStruct,
    declare_functions,
    f32_address,
)
from engine_worker.kernels.ops import (
    Activation,
    AttentionMetadata,
    AttentionShape,
    DecoderLayer,
    KvCache,
    PackedLinear,
    Weight,
)
from engine_worker.kernels.packing import GROUP, WeightFormat
from engine_worker.kernels.team_size import TeamSize

MAX_HEAD_SIZE: Final = 256
SCALE_BYTES: Final = 2  # of a token's int8 keys or values of one head


@dataclass(frozen=True, slots=True)
class CpuKvCache:
    """K and V of all layers in one mapping, in the layout of native/attention.h."""

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    memory: Tensor  # uint8
    layer_bytes: int
    keys: tuple[int, ...]  # address for each layer
    values: tuple[int, ...]

    def clear(self, blocks: Sequence[int]) -> None:
        key_bytes = self.values[0] - self.keys[0]  # of all blocks of a layer
        layers = self.memory.view(len(self.keys), self.layer_bytes)
        for part in (layers[:, :key_bytes], layers[:, key_bytes:]):
            part.view(len(self.keys), self.num_blocks, -1)[:, list(blocks)] = 0


class CpuOps:
    """Native kernels for weights of one format; see `engine_worker.kernels.ops.Ops` for the operators.

    ``weight_format``: "auto" (dense weights as bf16, quantised ones as they are), "bf16", "int8", "int4" (dense weights
    are quantised; quantised ones keep their bits), or "fp32": everything fp32. Activations are bf16, or fp32 with
    "fp32". ``kv_format``: keys and values as the activations, or int8. ``num_threads``: the most that are used, by
    default torch's number. Raises KernelsUnavailable if this machine cannot run the kernels.
    """

    def __init__(
        self,
        weight_format: WeightFormat = "auto",
        *,
        num_threads: int | None = None,
        build: BuildSettings | None = None,
        kv_format: KvFormat = "activations",
    ) -> None:
        self.weight_format = weight_format
        self.kv_format: KvFormat = kv_format
        self.activation_dtype = torch.float32 if weight_format == "fp32" else torch.bfloat16
        self._is_bf16 = int(weight_format != "fp32")
        self._threads = num_threads or torch.get_num_threads()  # of the next call; chosen anew by run_layers
        self._team_size = TeamSize(self._threads)
        build = build or BuildSettings()
        self.target = choose_target(build)  # the instructions that are used; another's results differ in the last bits
        self._native = declare_functions(load(build))
        self._arena = Arena()
        self._step: tuple[AttentionMetadata, StepStruct] | None = None
        # By identity, with what keeps the identity: hashing shapes and tensors anew for each call would cost more.
        self._shapes: dict[tuple[int, int], tuple[AttentionShape, ShapeStruct]] = {}
        self._ropes: dict[tuple[int, int, int], tuple[Any, RopeStruct]] = {}

    # ------------------------------------------------------------ weights

    def pack(self, weight: Weight, bias: Tensor | None = None) -> PackedLinear:
        n, k = weight.values.shape
        return self._packed(packing.convert(weight, self.weight_format), n, k, bias)

    def pack_head(self, weight: Weight) -> PackedLinear:
        n, k = weight.values.shape
        head_format: WeightFormat = "int8" if self.weight_format == "int4" else self.weight_format
        return self._packed(packing.convert(weight, head_format), n, k, None)

    def pack_gate_up(self, gate: Weight, up: Weight) -> PackedLinear:
        n, k = gate.values.shape
        both = packing.interleave(packing.convert(gate, self.weight_format), packing.convert(up, self.weight_format))
        return self._packed(both, 2 * n, k, None)

    def _packed(self, weight: Weight, n: int, k: int, bias: Tensor | None) -> PackedLinear:
        return PackedLinear(n=n, k=k, storage=packing.pack(weight, n, k, bias, self._arena), bias=bias)

    # ------------------------------------------------------------ linears

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        rows, width = x.shape
        self._native.norm(f32_address(x), f32_address(weight), eps, rows, width, out.data_ptr())
        return out

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, linear: PackedLinear) -> Tensor:
        out = torch.empty((x.shape[0], linear.n), dtype=self.activation_dtype)
        self._normed(x, norm_weight, eps, linear, out, Epilogue.STORE)
        return out

    def norm_gate_up(
        self, x: Tensor, norm_weight: Tensor, eps: float, gate_up: PackedLinear, activation: Activation
    ) -> Tensor:
        out = torch.empty((x.shape[0], gate_up.n // 2), dtype=self.activation_dtype)
        self._normed(x, norm_weight, eps, gate_up, out, GATED[activation])
        return out

    def logits(self, x: Tensor, norm_weight: Tensor, eps: float, head: PackedLinear) -> Tensor:
        out = torch.empty((x.shape[0], head.n), dtype=torch.float32)
        self._normed(x, norm_weight, eps, head, out, Epilogue.STORE_F32)
        return out

    def linear(self, h: Tensor, linear: PackedLinear) -> Tensor:
        out = torch.empty((h.shape[0], linear.n), dtype=self.activation_dtype)
        self._plain(h, linear, out, Epilogue.STORE)
        return out

    def linear_add(self, h: Tensor, linear: PackedLinear, residual: Tensor) -> None:
        _check(residual, torch.float32, linear.n)
        self._plain(h, linear, residual, Epilogue.ADD)

    def _normed(
        self, x: Tensor, norm_weight: Tensor, eps: float, linear: PackedLinear, out: Tensor, epilogue: int
    ) -> None:
        _check(x, torch.float32, linear.k)
        self._native.linear(
            linear.storage.address,
            x.data_ptr(),
            f32_address(norm_weight),
            eps,
            x.shape[0],
            out.data_ptr(),
            epilogue,
            self._is_bf16,
            self._threads,
        )

    def _plain(self, h: Tensor, linear: PackedLinear, out: Tensor, epilogue: int) -> None:
        _check(h, self.activation_dtype, linear.k)
        self._native.linear(
            linear.storage.address,
            h.data_ptr(),
            None,
            0.0,
            h.shape[0],
            out.data_ptr(),
            epilogue,
            self._is_bf16,
            self._threads,
        )

    # ------------------------------------------------------------ attention

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> CpuKvCache:
        block_bytes = self._kv_layer_bytes(block_size, num_kv_heads, head_size)
        memory = map_bytes(num_layers * num_blocks * sum(block_bytes))
        starts = [memory.data_ptr() + i * num_blocks * sum(block_bytes) for i in range(num_layers)]
        return CpuKvCache(
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            memory=memory,
            layer_bytes=num_blocks * sum(block_bytes),
            keys=tuple(starts),
            values=tuple(start + num_blocks * block_bytes[0] for start in starts),
        )

    def kv_bytes_per_block(self, num_layers: int, block_size: int, num_kv_heads: int, head_size: int) -> int:
        return num_layers * sum(self._kv_layer_bytes(block_size, num_kv_heads, head_size))

    def _kv_layer_bytes(self, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, int]:
        """Of the keys and of the values of a block of one layer."""
        if block_size % GROUP:
            raise ValueError(f"the native kernels need a block size that is a multiple of {GROUP}, not {block_size}")
        if head_size % 2 or not 0 < head_size <= MAX_HEAD_SIZE:
            raise ValueError(f"the native kernels need an even head size up to {MAX_HEAD_SIZE}, not {head_size}")
        if self.kv_format == "int8" and head_size % 4:
            raise ValueError(f"int8 keys and values need a head size that is a multiple of 4, not {head_size}")
        is_int8 = self.kv_format == "int8"
        of_value, of_token = (1, SCALE_BYTES) if is_int8 else (self.activation_dtype.itemsize, 0)
        tokens = block_size * num_kv_heads
        padded = -(-head_size // GROUP) * GROUP
        return tokens * (head_size * of_value + of_token), tokens * (padded * of_value + of_token)

    def rope_write_kv(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        cache: KvCache,
        layer: int,
        meta: AttentionMetadata,
        shape: AttentionShape,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 1e-6,
    ) -> None:
        assert isinstance(cache, CpuKvCache)
        self._native.rope_write(
            self._shape_address(shape, cache),
            self._step_address(meta),
            self._rope_address(cos_sin, q_norm, k_norm, norm_eps),
            self._qkv(qkv, shape),
            cache.keys[layer],
            cache.values[layer],
            self._is_bf16,
            self._threads,
        )

    def attention(
        self, qkv: Tensor, cache: KvCache, layer: int, meta: AttentionMetadata, shape: AttentionShape
    ) -> Tensor:
        assert isinstance(cache, CpuKvCache)
        out = torch.empty((qkv.shape[0], shape.num_heads * shape.head_size), dtype=self.activation_dtype)
        self._native.attention(
            self._shape_address(shape, cache),
            self._step_address(meta),
            self._qkv(qkv, shape),
            cache.keys[layer],
            cache.values[layer],
            out.data_ptr(),
            self._is_bf16,
            self._threads,
        )
        return out

    # ------------------------------------------------------------ whole layers

    def pack_layers(self, layers: Sequence[DecoderLayer]) -> NativeLayers:
        return native_layers(layers, self.kv_format)

    def run_layers(self, x: Tensor, layers: NativeLayers, cache: KvCache, meta: AttentionMetadata) -> None:
        assert isinstance(cache, CpuKvCache)
        _check(x, torch.float32, layers.width)
        shape = layers.layers[0].shape
        if (len(layers.layers), shape.num_kv_heads, shape.head_size) != (
            len(cache.keys),
            cache.num_kv_heads,
            cache.head_size,
        ):
            raise ValueError("the layers' number, KV heads or head size are not those of the cache")
        layers.use_block_size(cache.block_size)
        num_tokens = x.shape[0]
        if not num_tokens:
            return
        self._threads = self._team_size.choose(num_tokens)
        seconds = self._native.layers(
            ADDRESS(layers.structs),
            len(layers.layers),
            self._step_address(meta),
            x.data_ptr(),
            cache.keys[0],
            cache.values[0],
            cache.layer_bytes,
            self._is_bf16,
            self._threads,
        )
        self._team_size.report(num_tokens, self._threads, seconds)

    def _qkv(self, qkv: Tensor, shape: AttentionShape) -> int:
        _check(qkv, self.activation_dtype, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size)
        return qkv.data_ptr()

    def _step_address(self, meta: AttentionMetadata) -> int:
        if self._step is None or self._step[0] is not meta:
            self._step = (meta, StepStruct.of(meta))
        return ADDRESS(self._step[1])

    def _shape_address(self, shape: AttentionShape, cache: CpuKvCache) -> int:
        if (shape.num_kv_heads, shape.head_size) != (cache.num_kv_heads, cache.head_size):
            raise ValueError("the attention's KV heads or head size are not those of the cache")
        key = (id(shape), cache.block_size)
        known = self._shapes.get(key)
        if known is None:
            known = self._shapes[key] = (shape, ShapeStruct.of(shape, cache.block_size, self.kv_format))
        return ADDRESS(known[1])

    def _rope_address(self, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, eps: float) -> int:
        key = (id(cos_sin), id(q_norm), id(k_norm))
        known = self._ropes.get(key)
        if known is None:
            kept = (cos_sin, q_norm, k_norm)
            norms = [None if t is None else f32_address(t) for t in (q_norm, k_norm)]
            known = self._ropes[key] = (kept, RopeStruct(f32_address(cos_sin), cos_sin.shape[1], *norms, eps))
        return ADDRESS(known[1])


def _check(t: Tensor, dtype: torch.dtype, width: int) -> None:
    if t.dtype is not dtype or t.shape[1] != width or not t.is_contiguous():
        raise ValueError(f"expected contiguous {dtype} of width {width}, got {t.dtype} {tuple(t.shape)}")
