"""Which log `inspect`, `replay` and `tail` read: the one they are given, else that of a `headrace serve` here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from cli.groups import LocalLogSettings
from common.config import Loaded
from common.transport import RedisSettings

SERVE_FILE: Final = "serve.json"


def log_settings(loaded: Loaded) -> RedisSettings:
    """The connection: as given, else to the embedded log that runs in the state directory, else the default."""
    settings = loaded[RedisSettings]
    if "redis_url" in loaded.sources:
        return settings
    url = running_log(loaded[LocalLogSettings].state_dir)
    return settings.model_copy(update={"redis_url": url}) if url else settings


def running_log(state_dir: Path) -> str:
    """URL of the embedded log of the ``headrace serve`` that holds ``state_dir``; empty when there is none."""
    try:
        facts = json.loads((state_dir / SERVE_FILE).read_text(encoding="utf-8"))
        url = str(facts.get("log", ""))
        return url if url and Path(url.removeprefix("unix://")).is_socket() else ""
    except (OSError, ValueError, AttributeError):
        return ""
