"""A small random Llama on disk, with one token a byte: fast to load, and as exact as any model of its family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.integration.edge import letters_model

NAME = "tiny"
MAX_MODEL_LEN = 8192
_LAYERS, _HIDDEN, _INNER, _HEADS, _KV_HEADS = 2, 128, 256, 4, 2
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _HIDDEN,
    "intermediate_size": _INNER,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tiny_model(directory: Path) -> Path:
    """Make the model directory ``directory``; the same weights every time."""
    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = letters_model.tokenizer().vocab_size
    end = vocab_size - 1
    config = {**_CONFIG, "vocab_size": vocab_size, "bos_token_id": end, "eos_token_id": end}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_bytes(letters_model.tokenizer_json())
    tokenizer_config = {"eos_token": letters_model.END, "chat_template": _TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    save_file(_weights(vocab_size), directory / "model.safetensors")
    return directory


def _weights(vocab_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2026)

    def draw(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    key_size = _HIDDEN // _HEADS * _KV_HEADS
    weights = {
        "model.embed_tokens.weight": draw(vocab_size, _HIDDEN) * _HIDDEN**0.5,
        "model.norm.weight": torch.ones(_HIDDEN),
        "lm_head.weight": draw(vocab_size, _HIDDEN) * 3,  # sharp enough for greedy answers that are not one letter
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(_HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(_HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": draw(_HIDDEN, _HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": draw(key_size, _HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": draw(key_size, _HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": draw(_HIDDEN, _HIDDEN),
            f"{prefix}.mlp.gate_proj.weight": draw(_INNER, _HIDDEN),
            f"{prefix}.mlp.up_proj.weight": draw(_INNER, _HIDDEN),
            f"{prefix}.mlp.down_proj.weight": draw(_HIDDEN, _INNER),
        }
    return weights
