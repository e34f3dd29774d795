"""Which peers are found, and OpenVINO's side of a comparison with a pipeline of our own behind its pipe."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Final

import gguf
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench import peers
from bench.contenders import Load, openvino, outcome_of, token_jobs
from bench.peers import Places, find_peers, gguf_format
from bench.servers import ServerFailed, vllm
from cli.bench.workload import Prose

# Stands where openvino-genai's interpreter would: answers each line as the real program does, a token every 10 ms.
_PIPED: Final = """#!{python}
import json, sys
print(json.dumps({{"ready": True}}), flush=True)
for line in sys.stdin:
    jobs = json.loads(line)["jobs"]
    outcomes = [{{"sent_s": 0.0, "token_s": [0.05 + 0.01 * i for i in range(n)]}} for _, n in jobs]
    print(json.dumps({{"outcomes": outcomes}}), flush=True)
"""


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def write_gguf(path: Path, file_type: int | None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, "llama")
    if file_type is not None:
        writer.add_file_type(file_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make_program(path: Path, text: str = "#!/bin/sh\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setattr(peers, "_has", lambda _: False)


def test_a_gguf_file_says_its_format_itself(tmp_path: Path) -> None:
    assert gguf_format(write_gguf(tmp_path / "any.gguf", 3)) == "q4_1"
    assert gguf_format(write_gguf(tmp_path / "new.gguf", 99)) == "type99"
    assert gguf_format(write_gguf(tmp_path / "Old.gguf", None)) == "old"


@pytest.mark.usefixtures("nothing_installed")
def test_peers_are_found_where_they_are_documented_to_be(tmp_path: Path) -> None:
    own = write_gguf(tmp_path / "own" / "model.gguf", 3)
    there = tmp_path / "peers"
    assert find_peers(Places(there, (own,))) == []
    make_program(there / "bin" / "llama-server")
    make_program(there / "vllm" / "bin" / "vllm")
    make_program(there / "openvino" / "bin" / "python")
    write_gguf(there / "models" / "again.gguf", 3)  # a format that the first file has already
    write_gguf(there / "models" / "other.gguf", 2)
    for name in ("bf16/config.json", "openvino-int8/openvino_model.xml", "openvino-f16/openvino_model.xml"):
        (there / "models" / name).parent.mkdir(parents=True)
        (there / "models" / name).write_text("{}", encoding="utf-8")
    names = [found.name for found in find_peers(Places(there, (own,)))]
    assert names == ["llama-q4_1", "llama-q4_0", "vllm-bf16", "openvino-f16", "openvino-int8"]


@pytest.mark.usefixtures("nothing_installed")
def test_without_safetensors_vllm_has_nothing_to_serve(tmp_path: Path) -> None:
    make_program(tmp_path / "vllm" / "bin" / "vllm")
    assert find_peers(Places(tmp_path, ())) == []
    assert find_peers(Places(tmp_path, (), tmp_path / "elsewhere")) == []


def test_vllm_preloads_the_openmp_of_its_own_environment(tmp_path: Path) -> None:
    library = make_program(tmp_path / "lib" / "libiomp5.so")
    assert str(library) in vllm(tmp_path / "bin" / "vllm", tmp_path).environ["LD_PRELOAD"].split(":")


def test_jobs_in_process_have_the_lengths_of_the_workload(tokenizer_json: Path) -> None:
    tokenizer, prose = Tokenizer.from_file(str(tokenizer_json)), Prose(tokenizer=tokenizer_json)
    _, jobs = token_jobs(Load("D", 1, 0.34, tokenizer_json), prose, tokenizer)
    assert [(len(ids), num) for ids, num in jobs] == [(512 + 64, 64)] * 16
    assert len({tuple(ids[:512]) for ids, _ in jobs}) == 1
    assert len({tuple(ids) for ids, _ in jobs}) == 16
    assert token_jobs(Load("D", 2, 0.34, tokenizer_json), prose, tokenizer)[1] != jobs


def test_tokens_of_one_step_are_one_chunk() -> None:
    outcome = outcome_of(7, 1.0, [1.5, 1.75, 1.75, 2.0])
    assert (outcome.ttft_s, outcome.gaps_s, outcome.num_chunks, outcome.output_tokens) == (0.5, [0.25, 0.25], 3, 4)


def test_openvino_is_measured_through_its_pipe(tmp_path: Path, tokenizer_json: Path) -> None:
    python = make_program(tmp_path / "python", _PIPED.format(python=sys.executable))
    with openvino("openvino-f16", python, tmp_path).open(tmp_path / "files") as live:
        live.pause()
        live.resume()
        sample = live.measure(Load("A", 1, 1.0, tokenizer_json))
        live.pause()
    assert live.start_s > 0
    assert (sample.ttft_p50_ms, sample.itl_p50_ms) == pytest.approx((50, 10))
    assert sample.errors == 0


def test_openvino_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    python = make_program(tmp_path / "python", "#!/bin/sh\necho no such model >&2\n")
    with pytest.raises(ServerFailed, match="no such model"), openvino("x", python, tmp_path).open(tmp_path / "files"):
        pass
