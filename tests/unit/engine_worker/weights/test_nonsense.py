"""Model files that are readable and absurd: a refusal with a cause, never a fault of the program."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from common.errors import ConfigError
from engine_worker.assembly import EngineSettings, load_engine
from engine_worker.config import ComputeSettings, KvCacheSettings, ModelSettings, SchedulerSettings
from tests.unit.engine_worker.weights.tiny_gguf import (
    TOKENS,
    byte_level_vocabulary,
    llama_metadata,
    write_gguf,
)

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": len(TOKENS),
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def refusal(model: Path) -> str:
    settings = EngineSettings(
        model=ModelSettings(model=str(model)),
        compute=ComputeSettings(backend="torch", device="cpu"),
        scheduler=SchedulerSettings(max_num_seqs=4),
        kv_cache=KvCacheSettings(kv_cache_memory_bytes=1 << 20),
    )
    with pytest.raises(ConfigError) as refused:
        load_engine(settings)
    return refused.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {"attention.head_count": 0},
        {"attention.head_count": "four"},
        {"embedding_length": float("nan")},
        {"context_length": [1, 2]},
        {"attention.layer_norm_rms_epsilon": "small"},
        {"rope.scaling.type": 5},
    ],
)
def test_metadata_of_a_wrong_kind_or_size(tmp_path: Path, changes: dict[str, Any]) -> None:
    embedding = (np.zeros((len(TOKENS), 64), dtype=np.float32), "F32")
    file = write_gguf(tmp_path / "m.gguf", tensors={"token_embd.weight": embedding}, metadata=llama_metadata(**changes))
    assert refusal(file)


@pytest.mark.parametrize("key", ["tokens", "token_type", "merges"])
def test_a_vocabulary_that_is_a_number(tmp_path: Path, key: str) -> None:
    file = write_gguf(tmp_path / "m.gguf", metadata=llama_metadata(), vocabulary=byte_level_vocabulary(**{key: 7}))
    assert "m.gguf" in refusal(file)


def test_lists_within_lists_without_end(tmp_path: Path) -> None:
    key = struct.pack("<Q", 1) + b"k"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<I", 9)
    (tmp_path / "m.gguf").write_bytes(header + struct.pack("<IQ", 9, 1) * 5000)
    assert "m.gguf" in refusal(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": "two"},
        {"rms_norm_eps": {}},
        {"rope_parameters": 5},
        {"sliding_window": float("inf")},
        {"hidden_act": []},
    ],
)
def test_a_configuration_of_wrong_kinds(tmp_path: Path, changes: dict[str, Any]) -> None:
    save_file({"model.norm.weight": np.zeros(64, dtype=np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    (tmp_path / "tokenizer.json").write_text("{}")
    assert refusal(tmp_path)


def test_json_without_end(tmp_path: Path) -> None:
    save_file({"model.norm.weight": np.zeros(64, dtype=np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert tmp_path.name in refusal(tmp_path)
