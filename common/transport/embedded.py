"""An embedded Valkey server for one machine: started, shared and stopped with a data directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from common.config import Settings


class EmbeddedSettings(Settings):
    """The embedded server."""

    data_dir: Path = Field(default=Path("headrace-data"), description="Where the embedded server keeps its log")
    embedded_binary: Path | None = Field(default=None, description="valkey-server or redis-server to use (>= 7.0)")
    embedded_fsync: Literal["everysec", "always"] = Field(
        default="everysec", description="When the log reaches the disk"
    )
    embedded_port: int = Field(default=0, ge=0, le=65535, description="Loopback TCP port; 0 = unix socket only")
    embedded_max_memory_mb: int = Field(default=0, ge=0, description="Memory limit of the server; 0 = none")


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """A running server. ``is_ours``: this process started it and `stop` ends it; else it was found running."""

    url: str  # for RedisSettings.redis_url
    pid: int
    is_ours: bool

    @classmethod
    def start(cls, settings: EmbeddedSettings, *, timeout_s: float = 20.0) -> EmbeddedServer:
        """Start a server on the data directory, or find the one that runs there, and wait until it answers.

        A started server dies with this process's death signal. Raises `ConfigError` when there is no binary, or the
        directory is held by a server that does not answer; `LogUnavailable` when it does not come up in time.
        """
        raise NotImplementedError

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """Stop the server in order (it flushes its log); no-op when it was not ours."""
