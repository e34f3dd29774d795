"""Fingerprints, free memory, and where models come from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from common.errors import ModelFileMissing
from engine_worker.weights import hub
from engine_worker.weights.fingerprint import model_fingerprint, weights_digest
from engine_worker.weights.memory import available_bytes, human


def test_the_digest_follows_the_contents(tmp_path: Path) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"one")
    first = weights_digest([path])
    assert weights_digest([path]) == first
    path.write_bytes(b"two!")
    assert weights_digest([path]) != first
    path.write_bytes(b"one")
    assert weights_digest([path]) == first


def test_a_digest_that_is_known_is_not_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"one")
    first, times = weights_digest([path]), path.stat()
    path.write_bytes(b"two")  # the same size and time: the file is believed to be the same
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights_digest([path]) == first
    os.utime(path, ns=(0, 0))
    assert weights_digest([path]) != first


@pytest.mark.parametrize("content", ["not json", "[]", json.dumps({"files": {}, "sha256": "f" * 64})])
def test_a_remembered_digest_that_cannot_be_true_is_not_believed(tmp_path: Path, content: str) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"one")
    expected = weights_digest([path])
    (tmp_path / ".weights-digest.json").write_text(content)
    assert weights_digest([path]) == expected


def test_whatever_changes_logits_changes_the_fingerprint() -> None:
    assert model_fingerprint("d", {"a": 1}, "int8") == model_fingerprint("d", {"a": 1}, "int8")
    assert len({model_fingerprint("d", "int8"), model_fingerprint("d", "int4"), model_fingerprint("e", "int8")}) == 3


def _machine(tmp_path: Path, available_kib: int) -> Path:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 999 kB\nMemAvailable:   {available_kib} kB\n")
    return meminfo


def test_free_memory_of_the_machine(tmp_path: Path) -> None:
    assert available_bytes(_machine(tmp_path, 2048), tmp_path / "none") == 2048 * 1024


def test_a_container_limit_counts_and_page_cache_does_not(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 5\nactive_file 100000\ninactive_file 50000\n")
    assert available_bytes(_machine(tmp_path, 2048), tmp_path) == 550000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(_machine(tmp_path, 2048), tmp_path) == 2048 * 1024


def test_bytes_for_people() -> None:
    assert [human(512), human(1536), human(5 << 30)] == ["512 B", "1.5 KiB", "5 GiB"]


def test_hub_ids_are_told_from_paths() -> None:
    assert hub.is_hub_id("HuggingFaceTB/SmolLM2-135M-Instruct")
    for other in ("./model", "/data/model", "model", "a/b/c", "../x"):
        assert not hub.is_hub_id(other)


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelFileMissing, match="nobody/nothing"):
        hub.download("nobody/nothing")
