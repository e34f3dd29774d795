"""The operators a decoder is made of, behind one small interface.

A decoder keeps its residual stream in fp32, flat over the tokens of a step ``[T, D]``; everything between the
residual reads and writes is in the implementation's activation dtype. Fusions (norm + quantise, SiLU * up in the
gate_up epilogue, residual add in the o/down epilogue, rotary + KV write) are the implementation's business: the
interface names the fused operation, so that plain torch can do it in steps and native code in one pass.

Implementations: `ops_torch.TorchOps` (any dtype, any device: the fallback and the oracle of every test),
`cpu.CpuOps` (native C++), `triton_ops.TritonOps` (GPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A matrix as the checkpoint holds it."""

    values: Tensor  # [N, K] fp32 / bf16 / fp16


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix in groups of 32 along K, bit for bit as GGUF's Q8_0 (int8) or Q4_0 / Q4_1 (int4) hold it.

    int8: w = scale * v, v in -127..127.   int4: w = scale * v + min, v in 0..15 (Q4_0: min = -8 * scale).
    """

    values: Tensor  # [N, K] int8 (int8) or uint8 (int4, one value a byte)
    scales: Tensor  # [N, K / 32] fp16
    mins: Tensor | None  # [N, K / 32] fp16 for int4, None for int8


Weight = DenseWeight | QuantizedWeight


class Activation(Enum):
    """What stands between the two halves of an MLP: act(gate) * up."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer in the layout of the implementation that packed it."""

    n: int  # output features
    k: int  # input features
    storage: Any  # implementation's own
    bias: Tensor | None = None  # [N] fp32


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where this step's tokens stand. T tokens of B sequences, flat, sequence after sequence.

    All tensors int32 and contiguous, on the device of the model.
    """

    query_start: Tensor  # [B + 1]: tokens query_start[i] .. query_start[i + 1] - 1 belong to sequence i
    seq_lens: Tensor  # [B]: tokens of sequence i in the cache after this step's write (context + this step's)
    block_table_rows: Tensor  # [B]: row of block_tables that belongs to sequence i
    block_tables: Tensor  # [max_num_seqs, max_blocks_per_seq]: ids of physical blocks; shared, never copied
    slot_mapping: Tensor  # [T]: physical slot (block * block_size + offset) each token's K and V are written to
    positions: Tensor  # [T]: position of each token in its sequence
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Constant over a layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None  # a token sees itself and the window - 1 tokens before it
    soft_cap: float | None = None  # scores = cap * tanh(scores / cap)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """All of one layer, for operators that compute layers in one call. Norm weights are fp32 [D]."""

    shape: AttentionShape
    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    attention_norm: Tensor  # before attention
    mlp_norm: Tensor  # before the MLP
    norm_eps: float
    activation: Activation
    cos_sin: Tensor  # as `Ops.rope_write_kv` takes it
    q_norm: Tensor | None = None  # fp32 [HD]
    k_norm: Tensor | None = None
    after_attention_norm: Tensor | None = None  # over attention's result before it is added (Gemma 2)
    after_mlp_norm: Tensor | None = None


class KvCache(Protocol):
    """The cache tensors of all layers, in the layout of the implementation that allocated them."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def block_size(self) -> int: ...

    def clear(self, blocks: Sequence[int]) -> None:
        """Set K and V of these blocks to zero in all layers."""
        ...


class Ops(Protocol):
    """See the module. Shapes: T tokens, D hidden size, H heads, KH KV heads, HD head size, I intermediate size."""

    activation_dtype: torch.dtype

    def pack(self, weight: Weight, bias: Tensor | None = None) -> PackedLinear:
        """Bring a linear layer into this implementation's layout. Raises ValueError for shapes it cannot serve."""
        ...

    def pack_gate_up(self, gate: Weight, up: Weight) -> PackedLinear:
        """The two halves of an MLP as one layer for `norm_gate_up`."""
        ...

    def pack_head(self, weight: Weight) -> PackedLinear:
        """The output head, for `logits`: it loses more by coarse formats than a layer does, so it is int8 at least."""
        ...

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm: fp32 [T, D] -> fp32 [T, D]; weight fp32 [D]."""
        ...

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, linear: PackedLinear) -> Tensor:
        """linear(rms_norm(x)) : fp32 [T, D] -> activation [T, N]."""
        ...

    def norm_gate_up(
        self, x: Tensor, norm_weight: Tensor, eps: float, gate_up: PackedLinear, activation: Activation
    ) -> Tensor:
        """act(gate(h)) * up(h) with h = rms_norm(x) : fp32 [T, D] -> activation [T, I]."""
        ...

    def linear_add(self, h: Tensor, linear: PackedLinear, residual: Tensor) -> None:
        """residual += linear(h), in place: activation [T, K], fp32 [T, D]."""
        ...

    def linear(self, h: Tensor, linear: PackedLinear) -> Tensor:
        """activation [T, K] -> activation [T, N]."""
        ...

    def logits(self, x: Tensor, norm_weight: Tensor, eps: float, head: PackedLinear) -> Tensor:
        """head(rms_norm(x)) in fp32: fp32 [R, D] -> fp32 [R, V]."""
        ...

    def allocate_kv(
        self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> KvCache:
        """Zeroed cache tensors. Raises ValueError for a block or head size it cannot serve."""
        ...

    def kv_bytes_per_block(self, num_layers: int, block_size: int, num_kv_heads: int, head_size: int) -> int:
        """Bytes `allocate_kv` takes for each block, all layers together."""
        ...

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
        """Rotate Q and K in place (after the per-head RMSNorm of Qwen3 where given) and write K and V.

        qkv: activation [T, (H + 2 KH) * HD], Q | K | V.  cos_sin: fp32 [max_positions, rotary_dim], halves cos | sin
        (the NeoX order: element i pairs with i + rotary_dim / 2); rotary_dim <= HD, the rest is passed through.
        """
        ...

    def attention(
        self, qkv: Tensor, cache: KvCache, layer: int, meta: AttentionMetadata, shape: AttentionShape
    ) -> Tensor:
        """Causal attention of this step's tokens over the cache: activation [T, (H + 2 KH) * HD] -> [T, H * HD].

        Only Q is read from qkv; K and V come from the cache, where `rope_write_kv` has put this step's too.
        """
        ...


@runtime_checkable
class LayerOps(Protocol):
    """What an implementation of `Ops` may offer besides: all layers in one call."""

    def pack_layers(self, layers: Sequence[DecoderLayer]) -> Any:
        """The layers, packed by this implementation, as `run_layers` takes them. Raises ValueError if it cannot."""
        ...

    def run_layers(self, x: Tensor, layers: Any, cache: KvCache, meta: AttentionMetadata) -> None:
        """The layers over the residual stream fp32 [T, D], in place; K and V of layer i go to layer i of the cache."""
        ...
