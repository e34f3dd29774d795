"""A model's files, wherever they lie, as one thing: configuration, weights, tokenizer and templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from common.errors import CheckpointMismatch, ModelFileMissing, UnsupportedModel
from engine_worker.weights import hub
from engine_worker.weights.checkpoint import Checkpoint
from engine_worker.weights.gguf import GgufCheckpoint
from engine_worker.weights.gguf_config import generation_config, hf_config
from engine_worker.weights.gguf_tokenizer import tokenizer_files
from engine_worker.weights.safetensors import SafetensorsCheckpoint, has_safetensors

LoadFormat = Literal["auto", "safetensors", "gguf"]
ORIGIN_FILE: Final = "headrace.json"  # written by an import: where the model came from


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Everything read but the weights, which are opened and not yet read."""

    name: str  # under which it is served unless told otherwise
    root: str  # where it came from; a name, never a path of this machine
    config: Mapping[str, Any]  # config.json
    checkpoint: Checkpoint
    tokenizer_json: bytes
    tokenizer_config: Mapping[str, Any]
    chat_template: str  # empty = none
    generation_config: Mapping[str, Any]
    directory: Path | None = None  # of config.json and dense safetensors, where these are what was opened


def open_model(source: str, *, load_format: LoadFormat = "auto", revision: str = "") -> ModelFiles:
    """Open a model directory, a .gguf file, "demo" or a hub id.

    Raises `ModelFileMissing`, `UnsupportedModel` and `CheckpointMismatch`.
    """
    path = Path(source)
    if path.is_dir():
        return _open_directory(path, load_format, path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedModel(f"{path.name} is not a model: give a directory or a .gguf file", param="model")
        return open_gguf(path)
    if source == hub.DEMO:
        return replace(open_gguf(hub.find_demo_gguf()), name=hub.DEMO)
    if hub.is_hub_id(source):
        return _open_directory(hub.download(source, revision), load_format, source)
    raise ModelFileMissing(f"there is no model at {source!r}", param="model")


def open_gguf(path: Path) -> ModelFiles:
    """A .gguf file by itself: all other files are made from its metadata."""
    checkpoint = GgufCheckpoint(path)
    metadata = checkpoint.file.metadata
    tokenizer_json, tokenizer_config = tokenizer_files(metadata)
    return ModelFiles(
        name=path.stem,
        root=path.name,
        config=hf_config(checkpoint),
        checkpoint=checkpoint,
        tokenizer_json=tokenizer_json,
        tokenizer_config=tokenizer_config,
        chat_template=str(metadata.get("tokenizer.chat_template", "")),
        generation_config=generation_config(checkpoint.file),
    )


def _open_directory(directory: Path, load_format: LoadFormat, name: str) -> ModelFiles:
    uses_gguf = load_format == "gguf" or (load_format == "auto" and not has_safetensors(directory))
    gguf = _only_gguf(directory) if uses_gguf else None
    if gguf and not (directory / "config.json").is_file():
        return open_gguf(gguf)
    config = _read_json(directory / "config.json", required=True)
    tokenizer_config = _read_json(directory / "tokenizer_config.json")
    return ModelFiles(
        name=name,
        root=str(_read_json(directory / ORIGIN_FILE).get("source", name)),
        config=config,
        checkpoint=GgufCheckpoint(gguf) if gguf else SafetensorsCheckpoint(directory),
        tokenizer_json=_read_tokenizer(directory),
        tokenizer_config={key: value for key, value in tokenizer_config.items() if key != "chat_template"},
        chat_template=_read_template(directory, tokenizer_config),
        generation_config=_read_json(directory / "generation_config.json"),
        directory=None if gguf else directory,
    )


def _only_gguf(directory: Path) -> Path:
    found = sorted(directory.glob("*.gguf"))
    if not found:
        raise ModelFileMissing(f"{directory} holds no weights: neither .safetensors nor .gguf", param="model")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise UnsupportedModel(f"{directory} holds several .gguf files ({names}): name the one to serve", param="model")
    return found[0]


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        if required:
            raise ModelFileMissing(f"{path.parent} has no {path.name}", param="model") from error
        return {}
    except ValueError as error:
        raise CheckpointMismatch(f"{path.name} is not JSON: {error}", param="model") from error
    if not isinstance(parsed, dict):
        raise CheckpointMismatch(f"{path.name} is not a JSON object", param="model")
    return parsed


def _read_tokenizer(directory: Path) -> bytes:
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelFileMissing(
            f"{directory} has no tokenizer.json; transformers' AutoTokenizer can make one of the older formats",
            param="model",
        )
    return path.read_bytes()


def _read_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    given = tokenizer_config.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(given, list):  # several named ones
        named = {item["name"]: item["template"] for item in given}
        return str(named.get("default", ""))
    return str(given or "")
