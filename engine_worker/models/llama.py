"""The decoder of Llama and all that is built like it, flat over the tokens of a step, written on `Ops`."""

from __future__ import annotations

import torch
from torch import Tensor

from engine_worker.kernels.ops import (
    AttentionMetadata,
    AttentionShape,
    DecoderLayer,
    KvCache,
    LayerOps,
    Ops,
    PackedLinear,
    Weight,
)
from engine_worker.models.config import DecoderConfig
from engine_worker.models.layers import Embedding, WeightSource, rows, stack
from engine_worker.models.rope import rope_table


class LlamaDecoder:
    """Llama, Mistral, Qwen2, Qwen3, Phi-3, Gemma and Gemma 2, by the switches of their `DecoderConfig`."""

    def __init__(
        self, config: DecoderConfig, ops: Ops, weights: WeightSource, num_positions: int, device: torch.device
    ) -> None:
        """``num_positions``: of the longest sequence that is served. Raises `CheckpointMismatch`, and
        ValueError where ``ops`` cannot serve a shape."""
        self.config = config
        self._ops = ops
        self._cos_sin = rope_table(config.rope, num_positions).to(device)
        embedding_name, table = "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
        self._embedding = Embedding(weights.embedding(embedding_name, table), config.embedding_scale, device)
        loader = _LayerLoader(config, ops, weights, self._cos_sin, device)
        self._layers = [loader.layer(i) for i in range(config.num_layers)]
        # Where the operators offer it, all layers are one call: calls from Python cost a sixth of a step at batch 1.
        self._layer_ops = ops if isinstance(ops, LayerOps) else None
        self._packed_layers = self._layer_ops.pack_layers(self._layers) if self._layer_ops else None
        self._final_norm = loader.norm("model.norm.weight", config.hidden_size)
        is_tied = config.ties_head or not weights.has("lm_head.weight")
        self._head = ops.pack_head(weights.head(embedding_name if is_tied else "lm_head.weight", table))

    def hidden(self, token_ids: Tensor, cache: KvCache, meta: AttentionMetadata) -> Tensor:
        """int [T] -> fp32 [T, D] before the final norm; writes K and V of all T tokens."""
        x = self._embedding(token_ids)
        if self._layer_ops is not None:
            self._layer_ops.run_layers(x, self._packed_layers, cache, meta)
            return x
        ops, eps = self._ops, self.config.norm_eps
        for i, layer in enumerate(self._layers):
            qkv = ops.norm_linear(x, layer.attention_norm, eps, layer.qkv)
            ops.rope_write_kv(qkv, self._cos_sin, cache, i, meta, layer.shape, layer.q_norm, layer.k_norm, eps)
            attended = ops.attention(qkv, cache, i, meta, layer.shape)
            self._add(attended, layer.output, layer.after_attention_norm, x)
            gated = ops.norm_gate_up(x, layer.mlp_norm, eps, layer.gate_up, layer.activation)
            self._add(gated, layer.down, layer.after_mlp_norm, x)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, D], rows of `hidden` -> fp32 [R, V]."""
        logits = self._ops.logits(hidden, self._final_norm, self.config.norm_eps, self._head)
        cap = self.config.logit_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _add(self, h: Tensor, linear: PackedLinear, post_norm: Tensor | None, residual: Tensor) -> None:
        """residual += linear(h), normed first where the model has a norm there."""
        if post_norm is None:
            self._ops.linear_add(h, linear, residual)
        else:
            residual += self._ops.norm(self._ops.linear(h, linear).float(), post_norm, self.config.norm_eps)


class _LayerLoader:
    """Reads and packs one layer after the other."""

    def __init__(
        self, config: DecoderConfig, ops: Ops, weights: WeightSource, cos_sin: Tensor, device: torch.device
    ) -> None:
        self._config = config
        self._ops = ops
        self._weights = weights
        self._cos_sin = cos_sin
        self._device = device

    def norm(self, name: str, size: int) -> Tensor:
        return (self._weights.vector(name, size) + self._config.norm_offset).to(self._device)

    def layer(self, index: int) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        hidden, head_size = config.hidden_size, config.head_size
        has_post = config.has_post_norms
        mlp_norm = "pre_feedforward_layernorm" if has_post else "post_attention_layernorm"
        gate, up = self._gate_up(mlp)
        return DecoderLayer(
            cos_sin=self._cos_sin,
            norm_eps=config.norm_eps,
            activation=config.activation,
            attention_norm=self.norm(f"{prefix}input_layernorm.weight", hidden),
            qkv=self._ops.pack(self._qkv(attention), self._qkv_bias(attention)),
            q_norm=self.norm(f"{attention}q_norm.weight", head_size) if config.qk_norm else None,
            k_norm=self.norm(f"{attention}k_norm.weight", head_size) if config.qk_norm else None,
            shape=self._shape(index),
            output=self._linear(f"{attention}o_proj", hidden, config.num_heads * head_size, config.output_bias),
            after_attention_norm=self.norm(f"{prefix}post_attention_layernorm.weight", hidden) if has_post else None,
            mlp_norm=self.norm(f"{prefix}{mlp_norm}.weight", hidden),
            gate_up=self._ops.pack_gate_up(gate, up),
            down=self._linear(f"{mlp}down_proj", hidden, config.intermediate_size, has_bias=False),
            after_mlp_norm=self.norm(f"{prefix}post_feedforward_layernorm.weight", hidden) if has_post else None,
        )

    def _shape(self, index: int) -> AttentionShape:
        config = self._config
        return AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            scale=config.attention_scale,
            sliding_window=config.windows[index],
            soft_cap=config.attention_soft_cap,
        )

    def _linear(self, name: str, num_rows: int, num_columns: int, has_bias: bool) -> PackedLinear:
        (weight,) = self._weights.matrices([f"{name}.weight"], [(num_rows, num_columns)])
        return self._ops.pack(weight, self._weights.vector(f"{name}.bias", num_rows) if has_bias else None)

    def _qkv_parts(self) -> list[tuple[str, int]]:
        config = self._config
        kv_size = config.num_kv_heads * config.head_size
        return [("q_proj", config.num_heads * config.head_size), ("k_proj", kv_size), ("v_proj", kv_size)]

    def _qkv(self, prefix: str) -> Weight:
        hidden = self._config.hidden_size
        if self._config.is_fused:
            return self._weights.matrices([f"{prefix}qkv_proj.weight"], [(self._config.qkv_size, hidden)])[0]
        parts = self._qkv_parts()
        names = [f"{prefix}{name}.weight" for name, _ in parts]
        return stack(self._weights.matrices(names, [(size, hidden) for _, size in parts]))

    def _qkv_bias(self, prefix: str) -> Tensor | None:
        if not self._config.qkv_bias:
            return None
        return torch.cat([self._weights.vector(f"{prefix}{name}.bias", size) for name, size in self._qkv_parts()])

    def _gate_up(self, prefix: str) -> tuple[Weight, Weight]:
        size, hidden = self._config.intermediate_size, self._config.hidden_size
        if self._config.is_fused:
            (both,) = self._weights.matrices([f"{prefix}gate_up_proj.weight"], [(2 * size, hidden)])
            return rows(both, 0, size), rows(both, size, 2 * size)
        names = [f"{prefix}gate_proj.weight", f"{prefix}up_proj.weight"]
        gate, up = self._weights.matrices(names, [(size, hidden)] * 2)
        return gate, up
