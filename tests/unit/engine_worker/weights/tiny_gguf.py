"""Small GGUF files, written with the gguf package as llama.cpp's converter would write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

# Byte-level alphabet of the few characters the tests use, some merges, and two control tokens.
TOKENS = ["<|end|>", "<|user|>", *"abcdefghij0123456789", "Ġ", "Ċ", "ab", "Ġab", "cd", "abcd", "12", "123"]
MERGES = ["a b", "Ġ ab", "c d", "ab cd", "1 2", "12 3"]


def permute(weight: Array, num_heads: int) -> Array:
    """Rows of Q or K as llama.cpp wants them for its Llama: the two halves of each head interleaved."""
    shape = weight.shape
    halves: Array = weight.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:])
    return halves.swapaxes(1, 2).reshape(shape)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    tensors: Mapping[str, tuple[Array, str]] | None = None,
    metadata: Mapping[str, Any] | None = None,
    vocabulary: Mapping[str, Any] | None = None,
) -> Path:
    """``tensors``: GGUF name -> (values, type name). ``metadata``: whole keys; ``vocabulary``: tokenizer.ggml.*."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata or {}).items():
        _add(writer, key, value)
    for key, value in (vocabulary or byte_level_vocabulary()).items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    for name, (values, type_name) in (tensors or {}).items():
        kind = gguf.GGMLQuantizationType[type_name]
        if type_name == "F32":
            writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
        elif type_name == "F16":
            writer.add_tensor(name, values.astype(np.float16))
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_vocabulary(**changes: Any) -> dict[str, Any]:
    kinds = [3, 3] + [1] * (len(TOKENS) - 2)
    given = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": TOKENS,
        "token_type": kinds,
        "merges": MERGES,
        "eos_token_id": 0,
    }
    return {key: value for key, value in {**given, **changes}.items() if value is not None}


def llama_metadata(**changes: Any) -> dict[str, Any]:
    given = {
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    return {f"llama.{key}": value for key, value in {**given, **changes}.items() if value is not None}


def llama_tensors(type_name: str = "F32", seed: int = 3) -> dict[str, tuple[Array, str]]:
    """A two-layer Llama of the shapes in `llama_metadata`, Q and K in llama.cpp's order; norms and embedding F32."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Array:
        values: Array = (random.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)
        return values

    norm = (np.ones(64, np.float32), "F32")
    tensors: dict[str, tuple[Array, str]] = {
        "token_embd.weight": (matrix(len(TOKENS), 64), "F32"),
        "output_norm.weight": norm,
    }
    shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    shapes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    for layer in range(2):
        tensors[f"blk.{layer}.attn_norm.weight"] = tensors[f"blk.{layer}.ffn_norm.weight"] = norm
        for name, shape in shapes.items():
            tensors[f"blk.{layer}.{name}.weight"] = (matrix(*shape), type_name)
    return tensors


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
