"""What a decoder has to know of a model: parsed once from config.json, with each family's own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from common.errors import UnsupportedModel
from engine_worker.kernels.ops import Activation
from engine_worker.models.rope import RopeConfig, parse_rope

_ACTIVATIONS: Final = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_tanh": Activation.GELU_TANH,
}


MAX_LAYERS: Final = 10_000  # what is kept for each layer must not take the memory before that is looked at


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of one ``model_type`` differ from Llama; what config.json leaves out."""

    defaults: Mapping[str, Any]
    qkv_bias: bool | None = None  # None: as ``attention_bias`` says, on Q, K, V and the output projection
    qk_norm: bool = False  # RMSNorm over each head of Q and K before the rotation
    norm_offset: float = 0.0  # the norms multiply by offset + weight
    scales_embedding: bool = False  # by sqrt(hidden_size)
    has_post_norms: bool = False  # norms after attention and MLP too, before the residual is added
    gelu: bool = False  # whatever hidden_act says
    is_fused: bool = False  # the checkpoint holds qkv_proj and gate_up_proj


_GEMMA: Final = {"head_dim": 256, "tie_word_embeddings": True}

FAMILIES: Final[Mapping[str, Family]] = {
    "llama": Family({}),
    "mistral": Family({"sliding_window": 4096, "num_key_value_heads": 8}),
    "qwen2": Family({"num_key_value_heads": 32}, qkv_bias=True),
    "qwen3": Family({"num_key_value_heads": 32, "head_dim": 128}, qk_norm=True),
    "phi3": Family({"rms_norm_eps": 1e-5}, is_fused=True),
    "gemma": Family(_GEMMA, norm_offset=1.0, scales_embedding=True, gelu=True),
    "gemma2": Family(
        {
            **_GEMMA,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        norm_offset=1.0,
        scales_embedding=True,
        has_post_norms=True,
        gelu=True,
    ),
}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shapes and switches of one model."""

    architecture: str  # model_type of config.json
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    max_positions: int  # the context length the model was made for
    rope: RopeConfig
    windows: tuple[int | None, ...]  # sliding window of each layer, None = full attention
    activation: Activation
    attention_scale: float
    ties_head: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    norm_offset: float
    embedding_scale: float
    has_post_norms: bool
    is_fused: bool
    attention_soft_cap: float | None
    logit_soft_cap: float | None

    @property
    def qkv_size(self) -> int:
        """Rows of Q, K and V together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size


def parse_config(raw: Mapping[str, Any]) -> DecoderConfig:
    """``raw``: config.json. Raises `UnsupportedModel` naming the field, its value and what would be served."""
    model_type = str(raw.get("model_type", ""))
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModel(
            f"model_type {model_type!r} is not served; served are {', '.join(sorted(FAMILIES))}", param="model"
        )
    config = {**family.defaults, **raw}
    if config.get("mlp_bias", False):
        raise UnsupportedModel("config.json: mlp_bias is not served", param="model")
    hidden_size, num_heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModel(
            f"num_attention_heads ({num_heads}) is not a multiple of num_key_value_heads ({num_kv_heads})"
        )
    head_size = int(config.get("head_dim") or hidden_size // num_heads)
    scalar = config.get("query_pre_attn_scalar") or head_size
    attention_bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        architecture=model_type,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=_positive(config, "num_hidden_layers", MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=_positive(config, "max_position_embeddings"),
        rope=parse_rope(config, head_size),
        windows=_windows(config, model_type),
        activation=_activation(config, family),
        attention_scale=float(scalar) ** -0.5,
        ties_head=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias and family.qkv_bias is None,
        qk_norm=family.qk_norm,
        norm_offset=family.norm_offset,
        embedding_scale=float(hidden_size) ** 0.5 if family.scales_embedding else 1.0,
        has_post_norms=family.has_post_norms,
        is_fused=family.is_fused,
        attention_soft_cap=config.get("attn_logit_softcapping"),
        logit_soft_cap=config.get("final_logit_softcapping"),
    )


def _positive(config: Mapping[str, Any], name: str, most: int | None = None) -> int:
    value = config.get(name)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {name} must be a positive whole number, it is {value!r}", param="model")
    if most is not None and value > most:
        raise UnsupportedModel(f"config.json: {name} is {value}, served are at most {most}", param="model")
    return value


def _activation(config: Mapping[str, Any], family: Family) -> Activation:
    if family.gelu:
        return Activation.GELU_TANH
    name = config.get("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"config.json: hidden_act {name!r} is not served; served: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _windows(config: Mapping[str, Any], model_type: str) -> tuple[int | None, ...]:
    num_layers = _positive(config, "num_hidden_layers", MAX_LAYERS)
    window = config.get("sliding_window")
    if model_type in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        window = None
    if model_type == "llama" or window is None:
        return (None,) * num_layers
    layer_types = config.get("layer_types")
    if layer_types:
        return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)
    if model_type == "gemma2":
        return tuple(int(window) if i % 2 == 0 else None for i in range(num_layers))
    full = int(config.get("max_window_layers", 28)) if model_type in ("qwen2", "qwen3") else 0
    return tuple(int(window) if i >= full else None for i in range(num_layers))
