"""Why a process could not start, told to the parent that started it beside the log.

``headrace serve`` starts its children with the variable `FILE_VARIABLE`; what they leave there becomes its own line.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

FILE_VARIABLE: Final = "LAST_WORDS_FILE"
_LONGEST: Final = 1000


def leave(reason: str) -> None:
    """Leave ``reason`` (a text without secrets) for the parent; without one that asked for it nothing happens."""
    path = os.environ.get(FILE_VARIABLE)
    if path:
        with contextlib.suppress(OSError):  # the log has it, too
            Path(path).write_text(reason[:_LONGEST], encoding="utf-8")


def read(path: Path) -> str:
    """What a child left, as one line; empty when it left nothing."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return ""
    path.unlink(missing_ok=True)
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
