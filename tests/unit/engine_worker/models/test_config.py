"""config.json: what is read from it, what each family adds, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.errors import ConfigError, UnsupportedModel
from engine_worker.kernels.ops import Activation
from engine_worker.models.config import parse_config
from engine_worker.models.registry import model_length, weight_bytes

_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}


def test_a_llama() -> None:
    config = parse_config(_LLAMA)
    assert (config.num_heads, config.num_kv_heads, config.head_size, config.qkv_size) == (9, 3, 64, 960)
    assert config.ties_head
    assert (config.qkv_bias, config.qk_norm, config.has_post_norms) == (False, False, False)
    assert config.windows == (None,) * 30
    assert config.attention_scale == 0.125
    assert (config.rope.theta, config.rope.rotary_dim) == (100000.0, 64)


def test_what_a_family_adds() -> None:
    assert parse_config({**_LLAMA, "model_type": "qwen2"}).qkv_bias
    assert parse_config({**_LLAMA, "model_type": "qwen3"}).qk_norm
    assert parse_config({**_LLAMA, "model_type": "qwen3"}).head_size == 128
    gemma2 = parse_config({**_LLAMA, "model_type": "gemma2"})
    assert gemma2.activation is Activation.GELU_TANH
    assert (gemma2.attention_soft_cap, gemma2.logit_soft_cap, gemma2.norm_offset) == (50.0, 30.0, 1.0)
    assert gemma2.embedding_scale == 24.0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "mistral"}, (4096, 4096, 4096, 4096)),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "qwen2", "sliding_window": 64}, (None,) * 4),
        (
            {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2},
            (None, None, 64, 64),
        ),
        ({"model_type": "gemma2", "sliding_window": 8}, (8, None, 8, None)),
        (
            {"model_type": "gemma2", "sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"] * 2},
            (None, 8, None, 8),
        ),
    ],
)
def test_the_window_of_each_layer(changes: dict[str, Any], expected: tuple[int | None, ...]) -> None:
    assert parse_config({**_LLAMA, "num_hidden_layers": 4, **changes}).windows == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "'mamba' is not served"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
    ],
)
def test_what_is_refused_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse_config({**_LLAMA, **changes})


def test_counts_without_end_are_refused_before_anything_is_made_of_them() -> None:
    with pytest.raises(UnsupportedModel, match="num_hidden_layers"):
        parse_config(_LLAMA | {"num_hidden_layers": 2**31 - 1})
    endless = parse_config(_LLAMA | {"max_position_embeddings": 2**31 - 1})
    with pytest.raises(UnsupportedModel, match="give max_model_len"):
        model_length(endless, 0)
    assert model_length(endless, 4096) == 4096


def test_the_length_that_is_served() -> None:
    config = parse_config(_LLAMA)
    assert model_length(config, 0) == 8192
    assert model_length(config, 100) == 100
    with pytest.raises(ConfigError, match=r"max_model_len is 9000.*8192"):
        model_length(config, 9000)


def test_a_stretched_context() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
    assert model_length(parse_config({**_LLAMA, "rope_scaling": yarn}), 0) == 32768
    linear = parse_config({**_LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (model_length(linear, 0), model_length(linear, 16384)) == (8192, 16384)


def test_the_memory_of_weights_is_estimated_from_the_shapes() -> None:
    config = parse_config(_LLAMA)
    num_layer_weights, num_table_weights = 106_168_320, 49152 * 576
    assert weight_bytes(config, "none", torch.float32) == 4 * num_layer_weights + 6 * num_table_weights
    assert weight_bytes(config, "int4", torch.bfloat16) < weight_bytes(config, "int8", torch.bfloat16)
