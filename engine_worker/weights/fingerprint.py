"""Which weights these are: a digest over the contents of the weight files, remembered beside them."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

_CACHE_FILE: Final = ".weights-digest.json"


def weights_digest(paths: Sequence[Path]) -> str:
    """SHA-256, hex, over the weight files' contents.

    It is kept in a file beside the first of them and believed as long as names, sizes and modification times are the
    same; where that file cannot be written the contents are read anew each time.
    """
    state = _state(paths)
    cache = paths[0].parent / _CACHE_FILE
    known = _read(cache)
    if known.get("files") == state and isinstance(known.get("sha256"), str):
        return str(known["sha256"])
    digest = hashlib.sha256()
    for path in sorted(paths):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    remember_digest(paths, digest.hexdigest())
    return digest.hexdigest()


def remember_digest(paths: Sequence[Path], digest: str) -> None:
    """Write ``digest`` beside the files, where that is possible."""
    cache = paths[0].parent / _CACHE_FILE
    part = cache.with_suffix(".part")
    with contextlib.suppress(OSError):
        part.write_text(json.dumps({"files": _state(paths), "sha256": digest}), encoding="utf-8")
        part.replace(cache)


def model_fingerprint(digest: str, *parts: object) -> str:
    """SHA-256, hex, over the weights' digest and whatever else changes logits (``parts``, by their ``repr``)."""
    return hashlib.sha256("\n".join([digest, *map(repr, parts)]).encode()).hexdigest()


def _state(paths: Iterable[Path]) -> dict[str, list[int]]:
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}


def _read(cache: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
