"""`Ops` on a GPU: Triton kernels around cuBLAS matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import Tensor

from engine_worker.kernels.gpu.gated_activation import gated_activation
from engine_worker.kernels.gpu.matmul import matmul
from engine_worker.kernels.gpu.paged_attention import CHUNK, paged_attention
from engine_worker.kernels.gpu.rms_norm import rms_norm
from engine_worker.kernels.gpu.rotary_kv import rotary_kv
from engine_worker.kernels.ops import (
    Activation,
    AttentionMetadata,
    AttentionShape,
    DenseWeight,
    KvCache,
    PackedLinear,
    QuantizedWeight,
    Weight,
)


@dataclass(frozen=True, slots=True)
class TritonKvCache:
    """Keys and values of every layer: [num_blocks, block_size, num_kv_heads, head_size] each."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    num_blocks: int
    block_size: int

    def clear(self, blocks: Sequence[int]) -> None:
        for layer in (*self.keys, *self.values):
            layer[list(blocks)] = 0


class TritonOps:
    """Activations, weights and cache in one dtype (fp16, bf16 or fp32); quantised weights are widened when packed.

    Shapes and meaning of each operation: `engine_worker.kernels.ops.Ops`.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, *, deterministic: bool = False) -> None:
        """``deterministic``: a token's result is the same in any batch; slower (see docs/gpu.md)."""
        self.activation_dtype = dtype
        self._device = device
        self._linear = matmul if deterministic else F.linear
        # Split or not, the arithmetic is the same, but these are two kernels, and a compiler may contract them in
        # different ways: where bits count, there is only one of them.
        self._split = False if deterministic else None

    def pack(self, weight: Weight, bias: Tensor | None = None) -> PackedLinear:
        values = _widen(weight).to(device=self._device, dtype=self.activation_dtype).contiguous()
        n, k = values.shape
        packed_bias = None if bias is None else bias.to(device=self._device, dtype=self.activation_dtype)
        return PackedLinear(n=n, k=k, storage=values, bias=packed_bias)

    def pack_gate_up(self, gate: Weight, up: Weight) -> PackedLinear:
        return self.pack(DenseWeight(torch.cat([_widen(gate), _widen(up)])))

    def pack_head(self, weight: Weight) -> PackedLinear:
        return self.pack(weight)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, torch.float32)

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, linear: PackedLinear) -> Tensor:
        return self.linear(rms_norm(x, norm_weight, eps, self.activation_dtype), linear)

    def norm_gate_up(
        self, x: Tensor, norm_weight: Tensor, eps: float, gate_up: PackedLinear, activation: Activation
    ) -> Tensor:
        return gated_activation(self.norm_linear(x, norm_weight, eps, gate_up), activation)

    def linear_add(self, h: Tensor, linear: PackedLinear, residual: Tensor) -> None:
        residual.add_(self.linear(h, linear))

    def linear(self, h: Tensor, linear: PackedLinear) -> Tensor:
        return self._linear(h, cast("Tensor", linear.storage), linear.bias)

    def logits(self, x: Tensor, norm_weight: Tensor, eps: float, head: PackedLinear) -> Tensor:
        return self.norm_linear(x, norm_weight, eps, head).float()

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> TritonKvCache:
        if block_size < 16 or block_size & (block_size - 1) or CHUNK % block_size:
            raise ValueError(f"block_size must be a power of two from 16 to {CHUNK}, it is {block_size}")

        def tensors() -> tuple[Tensor, ...]:
            shape = (num_blocks, block_size, num_kv_heads, head_size)
            return tuple(
                torch.zeros(shape, dtype=self.activation_dtype, device=self._device) for _ in range(num_layers)
            )

        return TritonKvCache(keys=tensors(), values=tensors(), num_blocks=num_blocks, block_size=block_size)

    def kv_bytes_per_block(self, num_layers: int, block_size: int, num_kv_heads: int, head_size: int) -> int:
        return 2 * num_layers * block_size * num_kv_heads * head_size * self.activation_dtype.itemsize

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
        paged = cast("TritonKvCache", cache)
        rotary_kv(qkv, cos_sin, paged.keys[layer], paged.values[layer], meta, shape, q_norm, k_norm, norm_eps)

    def attention(
        self, qkv: Tensor, cache: KvCache, layer: int, meta: AttentionMetadata, shape: AttentionShape
    ) -> Tensor:
        paged = cast("TritonKvCache", cache)
        return paged_attention(qkv, paged.keys[layer], paged.values[layer], meta, shape, split=self._split)


def _widen(weight: Weight) -> Tensor:
    """fp32 or the checkpoint's own dtype [N, K]."""
    match weight:
        case DenseWeight(values=values):
            return values
        case QuantizedWeight(values=values, scales=scales, mins=mins):
            n, k = values.shape
            groups = values.view(n, k // 32, 32).float() * scales.float()[..., None]
            if mins is not None:
                groups += mins.float()[..., None]
            return groups.view(n, k)
