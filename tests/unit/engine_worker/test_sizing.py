"""Sizes that make no sense are refused at start, each in one line that names the setting and what it may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.config import load
from common.errors import ConfigError
from engine_worker.__main__ import GROUPS
from engine_worker.assembly import EngineSettings, load_engine
from engine_worker.config import ComputeSettings, KvCacheSettings, ModelSettings, SchedulerSettings
from tests.unit.engine_worker.models.tiny_models import make_model


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--memory-fraction 0", "kv_cache_memory_fraction: should be greater than 0, got '0'"),
        ("--memory-fraction -1", "kv_cache_memory_fraction: should be greater than 0, got '-1'"),
        ("--memory-fraction 2", "kv_cache_memory_fraction: should be less than or equal to 0.95, got '2'"),
        ("--memory-fraction nan", "kv_cache_memory_fraction: should be less than or equal to 0.95, got 'nan'"),
        ("--memory-fraction half", "kv_cache_memory_fraction: should be a valid number"),
        ("--kv-cache-memory-bytes -1", "kv_cache_memory_bytes: should be greater than or equal to 0, got '-1'"),
        ("--block-size 7", "block_size: should be a multiple of 8, got '7'"),
        ("--block-size 0", "block_size: should be greater than or equal to 8, got '0'"),
        ("--block-size 1024", "block_size: should be less than or equal to 256, got '1024'"),
        ("--max-model-len -5", "max_model_len: should be greater than or equal to 0, got '-5'"),
        ("--max-model-len 1", "max_model_len 1 leaves no room for an answer"),
        ("--max-num-seqs 0", "max_num_seqs: should be greater than or equal to 1, got '0'"),
        ("--max-num-seqs 1e3", "max_num_seqs: should be a valid integer"),
        ("--max-num-batched-tokens 15", "max_num_batched_tokens must be at least 16, or 0"),
        (
            "--max-num-seqs 100 --max-num-batched-tokens 50",
            "max_num_batched_tokens (50) must be at least max_num_seqs (100)",
        ),
        (
            "--max-prefill-tokens-beside-decodes -1",
            "max_prefill_tokens_beside_decodes: should be greater than or equal to 0",
        ),
    ],
)
def test_a_size_out_of_bounds_is_one_line(arguments: str, line: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(GROUPS, ["model", *arguments.split()], prog="headrace worker", environ={})
    assert line in raised.value.message
    assert len(raised.value.message.splitlines()) == 1


def test_every_mistake_is_told_at_once() -> None:
    wrong = ["--block-size", "7", "--max-num-seqs", "0", "--memory-fraction", "2"]
    with pytest.raises(ConfigError) as raised:
        load(GROUPS, ["model", *wrong], prog="headrace worker", environ={})
    assert len(raised.value.message.splitlines()) == 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_model("llama_3", directory)
    return directory


@pytest.mark.parametrize(
    ("length", "cache", "line"),
    [
        (100_000, {}, "max_model_len is 100000, but the model's positions reach to"),
        (0, {"kv_cache_memory_bytes": 1 << 14}, "but one request may have max_model_len ="),
        (0, {"kv_cache_memory_bytes": 1 << 50}, "kv_cache_memory_bytes asks for 1024 TiB, but only"),
        (0, {"kv_cache_memory_fraction": 1e-9}, "lower max_model_len, or raise kv_cache_memory_bytes"),
    ],
)
def test_what_the_model_and_the_memory_cannot_hold_is_one_line(
    model: Path, length: int, cache: dict[str, int], line: str
) -> None:
    settings = EngineSettings(
        ModelSettings(model=str(model), max_model_len=length, dtype="float32"),
        ComputeSettings(backend="torch", num_threads=1),
        SchedulerSettings(),
        KvCacheSettings(**cache),
    )
    with pytest.raises(ConfigError) as raised:
        load_engine(settings)
    assert line in raised.value.message
    assert "\n" not in raised.value.message
