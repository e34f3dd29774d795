"""``headrace bench engine`` and ``headrace bench step`` as commands, on a small random model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from cli.main import main
from tests.unit.engine_worker.models.tiny_models import make_model

_MEMORY = ("--kv-cache-memory-bytes", "20000000", "--max-num-seqs", "8")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    make_model("smollm2", directory)
    symbols = [chr(code) for code in range(0x21, 0x7B)] + ["Ġ"]  # a token a letter, below the model's vocabulary
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    return directory


def bench(*words: str, json_file: Path) -> tuple[str, dict[str, Any]]:
    """What a command printed, and its report."""
    command = [sys.executable, "-m", "cli.main", "bench", *words, "--json", str(json_file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=380)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(json_file.read_text(encoding="utf-8"))


def test_the_engine_is_measured_without_its_front_door(model: Path, tmp_path: Path) -> None:
    lengths = ("--prompt-tokens", "20-30", "--output-tokens", "6", "--system-tokens", "40")
    printed, report = bench(
        "engine", str(model), "--concurrency", "3", "--requests", "5", *lengths, *_MEMORY, json_file=tmp_path / "e.json"
    )
    run = report["workloads"]["engine"]
    figures = run["figures"]
    assert (figures["num_requests"], figures["num_errors"], figures["output_tokens_mean"]) == (5, 0, 6)
    assert 60 <= figures["prompt_tokens_mean"] <= 70
    assert figures["cached_tokens_mean"] > 0  # the beginning that all share
    assert figures["ttft_ms"]["p50"] > 0
    assert run["steps"] >= 12  # two rounds of six tokens
    assert 0 < sum(run["phases_s"].values()) <= figures["wall_s"]
    assert "output tokens/s" in printed
    assert "bound / taken" in printed


def test_a_load_that_the_model_cannot_take_is_a_mistake(model: Path) -> None:
    command = [sys.executable, "-m", "cli.main", "bench", "engine", str(model), "--workload", "E", *_MEMORY]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=380)
    assert done.returncode == 2
    assert "E has requests of 1532 tokens, the model takes 256" in done.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--batch", "0"), "batch: each should be 1 to 4096"),
        (("--batch", "1", "--batch", "4097"), "batch: each should be 1 to 4096"),
        (("--context", "0"), "context: each should be at least 1"),
        (("--prefill", "-1"), "prefill: each should be at least 1"),
    ],
)
def test_a_step_that_cannot_be_is_a_mistake_in_one_line(
    words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"headrace bench step: {reason}")


def test_a_step_is_measured_by_part(model: Path, tmp_path: Path) -> None:
    sizes = ("--batch", "1", "--batch", "4", "--context", "40", "--prefill", "64", "--seconds", "0.05")
    printed, report = bench("step", str(model), *sizes, json_file=tmp_path / "s.json")
    assert [row["name"] for row in report["rows"]] == ["1 @40", "4 @40", "prefill 64"]
    for row in report["rows"]:
        assert all(milliseconds >= 0 for milliseconds in row["parts_ms"].values()), row
        assert row["overhead_ms"] == pytest.approx(row["total_ms"] - row["parts_ms"]["forward"])
        assert row["num_steps"] >= 1
    assert "overhead" in printed


def test_pauses_of_streams_and_waits_of_long_prompts_are_measured_by_chunk(model: Path, tmp_path: Path) -> None:
    load = ("--streams", "2", "--prompts", "2", "--prompt-length", "60", "--chunks", "8", "--chunks", "40")
    printed, report = bench("long-prompts", str(model), *load, *_MEMORY, json_file=tmp_path / "p.json")
    small, large = report["rows"]
    assert (small["chunk"], large["chunk"]) == (8, 40)
    assert (small["gaps"], large["gaps"]) == (2 * 15, 2 * 3)  # two streams draw in every step
    for row in report["rows"]:
        assert 0 < row["gap_p50"] <= row["gap_p99"] <= row["gap_max"]
        assert 0 < row["ttft_first"] <= row["ttft_p50"] <= row["ttft_last"]
    assert "ITL p50" in printed
