"""Which peers are found here, and with which model files.

A directory of peers is laid out like this, each part only where it is wanted:

    bin/llama-server            else the one on PATH
    vllm/                       a virtual environment with vLLM's CPU build; else vllm on PATH
    openvino/                   a virtual environment with openvino-genai
    models/*.gguf               what llama-server serves, one contender for each file
    models/bf16/                safetensors, for vLLM and transformers: `python -m bench.safetensors_copy`
    models/openvino-*/          what optimum-cli exported, one contender for each
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.contenders import Contender, llama_in_process, openvino, served
from bench.servers import llama_cpp_python, llama_server, transformers_serve, vllm
from engine_worker.weights.gguf_file import GgufFile

_FILE_TYPES: Final = {0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 7: "q8_0", 15: "q4_k", 18: "q6_k", 32: "bf16"}
_LLAMA_SERVER_EXTRA: Final = ("llama_cpp", "fastapi", "uvicorn", "starlette_context", "pydantic_settings")


@dataclass(frozen=True, slots=True)
class Places:
    """Where peers and their files are looked for."""

    directory: Path
    ggufs: tuple[Path, ...]  # those of ``directory`` come on top
    hf_dir: Path | None = None  # empty: models/bf16 of ``directory``

    @property
    def safetensors(self) -> Path | None:
        where = self.hf_dir or self.directory / "models" / "bf16"
        return where if (where / "config.json").is_file() else None

    def all_ggufs(self) -> list[Path]:
        """One file for each format, the named ones first."""
        by_format: dict[str, Path] = {}
        for path in (*self.ggufs, *sorted(self.directory.glob("models/*.gguf"))):
            by_format.setdefault(gguf_format(path), path)
        return list(by_format.values())


def find_peers(places: Places) -> list[Contender]:
    """Those that can be started here, servers first."""
    found = _llama_cpp(places)
    if (hf_dir := places.safetensors) is not None:
        if binary := _program("vllm", places.directory / "vllm" / "bin" / "vllm"):
            found.append(served(vllm(binary, hf_dir)))
        if (binary := _program("transformers")) and _has(("transformers", "fastapi", "uvicorn")):
            found.append(served(transformers_serve(binary, hf_dir)))
    python = places.directory / "openvino" / "bin" / "python"
    if python.is_file():
        models = sorted(places.directory.glob("models/openvino-*/openvino_model.xml"))
        found += [openvino(model.parent.name, python, model.parent) for model in models]
    if places.ggufs and _has(("llama_cpp",)):
        found.append(llama_in_process(places.ggufs[0]))
    return found


def gguf_format(path: Path) -> str:
    """What the file says of itself, as llama.cpp writes it: q4_1, q8_0. Raises what `GgufFile` raises."""
    number = GgufFile(path).metadata.get("general.file_type")
    return _FILE_TYPES.get(number, f"type{number}") if isinstance(number, int) else path.stem.lower()


def _llama_cpp(places: Places) -> list[Contender]:
    binary = _program("llama-server", places.directory / "bin" / "llama-server")
    found = []
    if binary is not None:
        found += [served(llama_server(f"llama-{gguf_format(gguf)}", binary, gguf)) for gguf in places.all_ggufs()]
    if places.ggufs and _has(_LLAMA_SERVER_EXTRA):
        found.append(served(llama_cpp_python(places.ggufs[0])))
    return found


def _program(name: str, *candidates: Path) -> Path | None:
    on_path = shutil.which(name)
    return next((path for path in candidates if path.is_file()), Path(on_path) if on_path else None)


def _has(packages: Sequence[str]) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)
