"""A GGUF file's metadata as the files of a model directory: config.json and generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from common.errors import CheckpointMismatch, UnsupportedModel
from engine_worker.weights.gguf import GgufCheckpoint
from engine_worker.weights.gguf_file import GgufFile

_CLASSES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
}
# Tokens that end a turn or a text whatever the file names as its EOS, as the models' own generation_config.json say.
_END_TOKENS: Final = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
_CONTROL: Final = 3  # token type


@dataclass(frozen=True, slots=True)
class _Metadata:
    """Keys of the file's architecture."""

    values: Mapping[str, Any]
    architecture: str

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointMismatch(f"the GGUF file has no {self.architecture}.{key}", param="model")
        return value


def hf_config(checkpoint: GgufCheckpoint) -> dict[str, Any]:
    """config.json of the model. Raises `UnsupportedModel` and `CheckpointMismatch`."""
    file = checkpoint.file
    architecture = str(file.metadata.get("general.architecture", ""))
    if architecture not in _CLASSES:
        served = ", ".join(sorted(set(_CLASSES) - {"mistral"}))
        raise UnsupportedModel(f"GGUF architecture {architecture!r} is not served; served: {served}", param="model")
    meta = _Metadata(file.metadata, architecture)
    if meta.get("expert_count", 0):
        raise UnsupportedModel("models with experts (MoE) are not served", param="model")
    window = meta.get("attention.sliding_window")
    model_type = "mistral" if architecture == "llama" and window else architecture
    num_heads, head_dim = meta.need("attention.head_count"), _head_dim(meta)
    config: dict[str, Any] = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": checkpoint.shape("model.embed_tokens.weight")[0],
        "hidden_size": meta.need("embedding_length"),
        "intermediate_size": meta.need("feed_forward_length"),
        "num_hidden_layers": meta.need("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": _rounded(meta.need("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": meta.need("context_length"),
        "rope_parameters": _rope(meta, checkpoint, head_dim),
        "tie_word_embeddings": not checkpoint.has("lm_head.weight"),
        "attention_bias": checkpoint.has("model.layers.0.self_attn.q_proj.bias"),
        "hidden_act": "gelu_pytorch_tanh" if architecture.startswith("gemma") else "silu",
        "torch_dtype": "bfloat16",
        **_special_ids(file.metadata),
    }
    if window:
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    elif model_type in ("mistral", "phi3"):
        config["sliding_window"] = None
    if architecture == "gemma2":
        config |= _gemma2(meta)
    return config


def generation_config(file: GgufFile) -> dict[str, Any]:
    """generation_config.json: every token that ends an answer."""
    tokens, kinds = file.metadata.get("tokenizer.ggml.tokens", []), file.metadata.get("tokenizer.ggml.token_type", [])
    ids = [file.metadata.get(f"tokenizer.ggml.{name}") for name in ("eos_token_id", "eot_token_id", "eom_token_id")]
    control = {tokens[i]: i for i, kind in enumerate(kinds) if kind == _CONTROL}
    ids += [control.get(token) for token in _END_TOKENS]
    special = _special_ids(file.metadata)
    return {**special, "eos_token_id": list(dict.fromkeys(i for i in ids if i is not None))}


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    names = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    found = {name: metadata.get(f"tokenizer.ggml.{key}") for name, key in names.items()}
    return {name: int(value) for name, value in found.items() if value is not None}


def _head_dim(meta: _Metadata) -> int:
    return int(meta.get("attention.key_length") or meta.need("embedding_length") // meta.need("attention.head_count"))


def _rounded(value: float) -> float:
    """The decimal that was written down before it became fp32: 9.999999747378752e-06 is 1e-05."""
    return float(f"{value:.7g}")


def _rope(meta: _Metadata, checkpoint: GgufCheckpoint, head_dim: int) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": _rounded(meta.get("rope.freq_base", 10000.0))}
    rotary_dim = int(meta.get("rope.dimension_count", head_dim))
    if rotary_dim != head_dim:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    context = int(meta.need("context_length"))
    original = int(meta.get("rope.scaling.original_context_length", context))
    tensors = checkpoint.file.tensors
    if "rope_freqs.weight" in tensors:  # Llama 3's scaling, already worked out for each frequency
        factors = checkpoint.vector("rope_freqs.weight").tolist()
        return rope | _long_rope(factors, factors, context, 1.0)
    if "rope_factors_long.weight" in tensors:
        long, short = (checkpoint.vector(f"rope_factors_{kind}.weight").tolist() for kind in ("long", "short"))
        return rope | _long_rope(short, long, original, meta.get("rope.scaling.attn_factor"))
    kind = meta.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": float(meta.need("rope.scaling.factor"))}
        if kind == "yarn":
            rope["original_max_position_embeddings"] = original
    elif kind != "none":
        raise UnsupportedModel(f"rope scaling {kind!r} without its factors is not served", param="model")
    return rope


def _long_rope(short: list[float], long: list[float], original: int, magnitude: float | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    rope["original_max_position_embeddings"] = original
    return rope if magnitude is None else {**rope, "attention_factor": float(magnitude), "factor": 1.0}


def _gemma2(meta: _Metadata) -> dict[str, Any]:
    # The 27B model alone scales its queries by hidden size over heads; the file does not say so.
    is_27b = meta.need("block_count") == 46
    scalar = meta.need("embedding_length") // meta.need("attention.head_count") if is_27b else 256
    return {
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": float(meta.get("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(meta.get("final_logit_softcapping", 30.0)),
        "hidden_activation": "gelu_pytorch_tanh",
    }
