"""A GGUF file's metadata becomes the config.json and generation_config.json that transformers would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import CheckpointMismatch, UnsupportedModel
from engine_worker.models.config import parse_config
from engine_worker.weights.gguf import GgufCheckpoint
from engine_worker.weights.gguf_config import generation_config, hf_config
from tests.unit.engine_worker.weights.tiny_gguf import (
    TOKENS,
    byte_level_vocabulary,
    llama_metadata,
    llama_tensors,
    write_gguf,
)


def _config(tmp_path: Path, tensors: Any = None, vocabulary: Any = None, **metadata: Any) -> dict[str, Any]:
    path = tmp_path / "m.gguf"
    write_gguf(
        path, tensors={**llama_tensors(), **(tensors or {})}, metadata=llama_metadata(**metadata), vocabulary=vocabulary
    )
    return hf_config(GgufCheckpoint(path))


def test_a_llama(tmp_path: Path) -> None:
    config = _config(tmp_path)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == len(TOKENS)
    assert config["rms_norm_eps"] == 1e-5  # not the nearest fp32 number
    assert config["tie_word_embeddings"] is True
    parsed = parse_config(config)
    assert (parsed.num_layers, parsed.num_kv_heads, parsed.head_size) == (2, 2, 16)


def test_an_own_head_and_biases_are_seen(tmp_path: Path) -> None:
    head = (np.zeros((len(TOKENS), 64), np.float32), "F32")
    bias = (np.zeros(64, np.float32), "F32")
    config = _config(tmp_path, {"output.weight": head, "blk.0.attn_q.bias": bias})
    assert config["tie_word_embeddings"] is False
    assert config["attention_bias"] is True


def test_a_sliding_window_makes_a_llama_a_mistral(tmp_path: Path) -> None:
    assert parse_config(_config(tmp_path, **{"attention.sliding_window": 32})).windows == (32, 32)


def test_frequencies_that_the_file_has_worked_out(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    rope = _config(tmp_path, {"rope_freqs.weight": (factors, "F32")})["rope_parameters"]
    assert rope["rope_type"] == "longrope"
    assert rope["short_factor"] == rope["long_factor"] == factors.tolist()
    assert rope["attention_factor"] == 1.0


def test_yarn(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    rope = _config(tmp_path, **{f"rope.scaling.{key}": value for key, value in scaling.items()})["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 64)


def test_every_token_that_ends_an_answer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", vocabulary=byte_level_vocabulary(eos_token_id=5, eot_token_id=1))
    assert generation_config(GgufCheckpoint(path).file)["eos_token_id"] == [5, 1, 0]  # <|end|> is known by its name


def test_what_is_not_served_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'mamba'"):
        hf_config(GgufCheckpoint(write_gguf(tmp_path / "m.gguf", "mamba")))
    with pytest.raises(UnsupportedModel, match="experts"):
        _config(tmp_path, expert_count=8)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match=r"llama\.block_count"):
        _config(tmp_path, block_count=None)
