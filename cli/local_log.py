"""Which log `inspect`, `replay` and `tail` read: the one they are given, else that of a `headrace serve` here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from cli.groups import LocalLogSettings
from common.config import Loaded
from common.errors import LogUnavailable
from common.transport import LogClient, RedisSettings

SERVE_FILE: Final = "serve.json"


async def open_log(loaded: Loaded) -> LogClient:
    """The log as given, else the embedded one of the state directory, else the default. Raises `LogUnavailable`."""
    settings = log_settings(loaded)
    try:
        return await LogClient.open(settings)
    except LogUnavailable as error:
        if settings is not loaded[RedisSettings] or "redis_url" in loaded.sources:
            raise
        place = loaded[LocalLogSettings].state_dir.absolute()
        hint = f"no headrace serve runs in {place} and no --redis-url was given; --state-dir names another place"
        raise LogUnavailable(f"{error.message}\n{hint}") from error


def log_settings(loaded: Loaded) -> RedisSettings:
    """The connection that `open_log` makes; the loaded settings themselves where no log was found here."""
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
