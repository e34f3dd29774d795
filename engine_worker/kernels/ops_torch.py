"""The operators in plain torch: the fallback on any device, and the oracle that native kernels are tested against."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from engine_worker.kernels.attention_torch import (
    AttentionPlan,
    PagedHeads,
    TorchKvCache,
    paged_attention,
    plan_attention,
)
from engine_worker.kernels.kv_quantization import KvFormat
from engine_worker.kernels.ops import (
    Activation,
    AttentionMetadata,
    AttentionShape,
    DenseWeight,
    KvCache,
    PackedLinear,
    Weight,
)
from engine_worker.kernels.packing import dequantize


def _dense(weight: Weight) -> Tensor:
    return weight.values if isinstance(weight, DenseWeight) else dequantize(weight)


class TorchOps:
    """`Ops` in ``dtype`` on ``device``. Quantised weights are dequantised when they are packed.

    On the CPU linears go through oneDNN with weights packed for it, 2 to 3 times as fast as unpacked ones for the few
    rows of a decode step.
    """

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", *, kv_format: KvFormat = "activations"
    ) -> None:
        """Raises ValueError for a dtype other than float32 and bfloat16."""
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"activations are float32 or bfloat16, not {dtype}")
        self.activation_dtype = dtype
        self.device = torch.device(device)
        self.kv_format: KvFormat = kv_format
        self._uses_onednn = self.device.type == "cpu" and _onednn_serves(dtype)
        self._planned_for: AttentionMetadata | None = None
        self._plans: dict[int | None, AttentionPlan] = {}

    # ------------------------------------------------------------------------------------------------- linears

    def pack(self, weight: Weight, bias: Tensor | None = None) -> PackedLinear:
        n, k = weight.values.shape
        values = _dense(weight).to(device=self.device, dtype=self.activation_dtype)
        on_device = None if bias is None else bias.to(device=self.device, dtype=self.activation_dtype)
        apply: Callable[[Tensor], Tensor]
        if self._uses_onednn:
            packed = torch.ops.mkldnn._reorder_linear_weight(values.contiguous(), None)
            apply = partial(_onednn_linear, packed, on_device)
        else:
            apply = partial(_plain_linear, values, on_device)
        return PackedLinear(n=n, k=k, storage=apply, bias=bias)

    def pack_gate_up(self, gate: Weight, up: Weight) -> PackedLinear:
        return self.pack(
            DenseWeight(torch.cat([_dense(gate).to(self.activation_dtype), _dense(up).to(self.activation_dtype)]))
        )

    def pack_head(self, weight: Weight) -> PackedLinear:
        return self.pack(weight)

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, linear: PackedLinear) -> Tensor:
        return self.linear(self.norm(x, norm_weight, eps).to(self.activation_dtype), linear)

    def norm_gate_up(
        self, x: Tensor, norm_weight: Tensor, eps: float, gate_up: PackedLinear, activation: Activation
    ) -> Tensor:
        gate, up = self.norm_linear(x, norm_weight, eps, gate_up).chunk(2, dim=-1)
        match activation:
            case Activation.SILU:
                return functional.silu(gate) * up
            case Activation.GELU_TANH:
                return functional.gelu(gate, approximate="tanh") * up

    def linear_add(self, h: Tensor, linear: PackedLinear, residual: Tensor) -> None:
        residual += self.linear(h, linear)

    def linear(self, h: Tensor, linear: PackedLinear) -> Tensor:
        applied: Tensor = linear.storage(h)
        return applied

    def logits(self, x: Tensor, norm_weight: Tensor, eps: float, head: PackedLinear) -> Tensor:
        return self.norm_linear(x, norm_weight, eps, head).float()

    # ----------------------------------------------------------------------------------------------- attention

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> TorchKvCache:
        shape = (num_blocks, block_size, num_kv_heads, head_size)
        both = [self._paged_heads(shape) for _ in range(2 * num_layers)]
        return TorchKvCache(both[:num_layers], both[num_layers:], num_blocks, block_size)

    def _paged_heads(self, shape: tuple[int, ...]) -> PagedHeads:
        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        if self.kv_format == "int8":
            return PagedHeads(zeros(shape, torch.int8), zeros(shape[:-1], torch.bfloat16))
        return PagedHeads(zeros(shape, self.activation_dtype), None)

    def kv_bytes_per_block(self, num_layers: int, block_size: int, num_kv_heads: int, head_size: int) -> int:
        of_head = head_size * self.activation_dtype.itemsize if self.kv_format == "activations" else head_size + 2
        return 2 * num_layers * block_size * num_kv_heads * of_head

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
        assert isinstance(cache, TorchKvCache)
        num_q, num_kv = shape.num_heads, shape.num_kv_heads
        heads = qkv.view(-1, num_q + 2 * num_kv, shape.head_size)
        q, k, v = torch.split(heads, [num_q, num_kv, num_kv], dim=1)
        if q_norm is not None:
            q.copy_(self.norm(q.float(), q_norm, norm_eps))
        if k_norm is not None:
            k.copy_(self.norm(k.float(), k_norm, norm_eps))
        _rotate(heads[:, : num_q + num_kv], cos_sin[meta.positions][:, None])
        slots = meta.slot_mapping
        cache.keys[layer].write(slots, k)
        cache.values[layer].write(slots, v)

    def attention(
        self, qkv: Tensor, cache: KvCache, layer: int, meta: AttentionMetadata, shape: AttentionShape
    ) -> Tensor:
        assert isinstance(cache, TorchKvCache)
        heads = qkv.view(qkv.shape[0], -1, shape.head_size)
        out = qkv.new_empty(qkv.shape[0], shape.num_heads, shape.head_size)
        plan = self._plan(meta, cache.block_size, shape.sliding_window)
        paged_attention(heads[:, : shape.num_heads], cache.keys[layer], cache.values[layer], plan, shape, out)
        return out.flatten(1)

    def _plan(self, meta: AttentionMetadata, block_size: int, window: int | None) -> AttentionPlan:
        """Made in the first layer of a step and kept for the others."""
        if self._planned_for is not meta:
            self._planned_for = meta
            self._plans.clear()
        if window not in self._plans:
            self._plans[window] = plan_attention(meta, block_size, window)
        return self._plans[window]


def _onednn_serves(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _onednn_linear(packed: Tensor, bias: Tensor | None, h: Tensor) -> Tensor:
    applied: Tensor = torch.ops.mkldnn._linear_pointwise(h, packed, bias, "none", [], "")
    return applied


def _plain_linear(values: Tensor, bias: Tensor | None, h: Tensor) -> Tensor:
    return functional.linear(h, values, bias)


def _rotate(x: Tensor, cos_sin: Tensor) -> None:
    """In place; x: [T, heads, HD], cos_sin: fp32 [T, 1, rotary_dim], halves cos | sin."""
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[..., :half], cos_sin[..., half:]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()
    rotated = first * cos - second * sin, second * cos + first * sin  # both before x, which may be what is read
    x[..., :half], x[..., half : 2 * half] = rotated
