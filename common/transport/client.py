"""The connection to the log."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.config import Settings
from common.transport.keys import Keys
from common.transport.leases import Lease


class RedisSettings(Settings):
    """How to reach the log and what it promises."""

    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="redis://, rediss://, unix:///path, redis+sentinel://h1:p1,h2:p2/name or redis+cluster://h1:p1,h2:p2",
    )
    key_prefix: str = Field(default="headrace:", max_length=64, description="Prefix of every key and channel")
    partitions: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Partitions of the key space. Unset: as the deployment was first started (then 16, or 1 over a unix socket)",
    )
    durability: Literal["standard", "strict"] = Field(
        default="standard",
        description="strict: nothing is shown before it is on disk (appendfsync always) or on strict_replicas replicas",
    )
    strict_replicas: int = Field(
        default=0,
        ge=0,
        le=8,
        description="Replicas that must acknowledge in strict mode; 0 relies on appendfsync always",
    )
    strict_wait_ms: int = Field(default=1000, ge=1, le=60_000, description="Longest wait for those replicas")
    redis_connect_timeout_s: float = Field(default=2.0, gt=0, le=60, description="Time to connect")
    redis_timeout_s: float = Field(default=5.0, gt=0, le=60, description="Time for one answer")
    redis_retry_s: float = Field(default=5.0, ge=0, le=600, description="How long one call is retried over reconnects")
    redis_max_connections: int = Field(default=32, ge=2, le=4096, description="Connections for commands, a process")
    retention_s: int = Field(default=900, ge=1, le=604_800, description="How long an ended request stays readable")
    request_ttl_s: int = Field(default=86_400, ge=60, description="Life of an accepted request without a deadline")
    reader_timeout_s: float = Field(
        default=30.0,
        ge=1,
        le=3600,
        description="Without a sign of a reader for so long (plus the grace time): orphaned",
    )
    blob_cache_bytes: int = Field(default=268_435_456, ge=0, description="Largest blob accepted by the registry")

    @property
    def reader_refresh_s(self) -> float:
        """How often an edge says that a request still has a reader."""
        return self.reader_timeout_s / 4


class LogClient:
    """One process's connections to the log. Everything else in this package is built on it; `close` it at the end.

    redis types stay inside this package: failures come out as `LogUnavailable`, `LogCorrupt` or `ConfigError`.
    """

    settings: RedisSettings
    keys: Keys
    generation: int
    """Counts (re)connections: when it changed, replies may have been lost."""

    @classmethod
    async def open(cls, settings: RedisSettings) -> LogClient:
        """Connect and check the deployment.

        Raises `LogUnavailable`, and `ConfigError` for a malformed URL, a server that is too old, another partition
        count than the deployment's, an eviction policy that would drop requests, or strict durability that the server
        does not give.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Close all connections. No call may be in flight."""

    async def ping(self) -> float:
        """Round trip in seconds, without retries. Raises `LogUnavailable`."""
        raise NotImplementedError

    def lease(self, worker: str, ttl_s: float = 3.0) -> Lease:
        """A new incarnation's lease with connections of its own, for use from one other thread."""
        raise NotImplementedError
