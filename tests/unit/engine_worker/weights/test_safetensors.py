"""Hugging Face directories: one file or shards; what is missing or damaged is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.errors import CheckpointMismatch, ModelFileMissing, UnsupportedModel
from engine_worker.weights.safetensors import INDEX_FILE, SINGLE_FILE, SafetensorsCheckpoint, has_safetensors

A, B = torch.arange(6.0).view(2, 3), torch.ones(4, dtype=torch.bfloat16)


def _shards(directory: Path) -> None:
    save_file({"a": A}, directory / "model-00001-of-00002.safetensors")
    save_file({"b": B}, directory / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def _single(directory: Path) -> None:
    save_file({"a": A, "b": B}, directory / SINGLE_FILE)


@pytest.mark.parametrize("write", [_single, _shards])
def test_tensors_are_found_in_one_file_and_in_shards(tmp_path: Path, write: object) -> None:
    assert not has_safetensors(tmp_path)
    assert callable(write)
    write(tmp_path)
    assert has_safetensors(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert (checkpoint.has("a"), checkpoint.has("c")) == (True, False)
    assert checkpoint.shape("a") == (2, 3)
    assert torch.equal(checkpoint.weight("a").values, A)
    assert checkpoint.vector("b").dtype == torch.float32
    assert checkpoint.stored_format("a") == "none"
    with pytest.raises(CheckpointMismatch, match="tensor c is missing"):
        checkpoint.shape("c")


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    _shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFileMissing, match="model-00002-of-00002"):
        SafetensorsCheckpoint(tmp_path)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelFileMissing, match=r"model\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("index", ["not json", "[]", '{"weight_map": 3}', "{}"])
def test_a_malformed_index(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX_FILE).write_text(index)
    with pytest.raises(CheckpointMismatch, match="malformed"):
        SafetensorsCheckpoint(tmp_path)


def test_an_index_does_not_lead_out_of_its_directory(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file({"a": A}, tmp_path / "secret.safetensors")
    (inside / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(ModelFileMissing, match="secret"):
        SafetensorsCheckpoint(inside)


def test_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(b"\x10\0\0\0\0\0\0\0garbage")
    with pytest.raises(CheckpointMismatch, match="damaged"):
        SafetensorsCheckpoint(tmp_path)


def test_a_dtype_that_is_not_served(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, 2, dtype=torch.int32)}, tmp_path / SINGLE_FILE)
    with pytest.raises(UnsupportedModel, match="int32"):
        SafetensorsCheckpoint(tmp_path).weight("a")
