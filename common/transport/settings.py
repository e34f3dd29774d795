"""How to reach the log and what it promises."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from common.config import Flags, Settings


class RedisSettings(Settings):
    """The connection to the log, its durability and its retention."""

    redis_url: Annotated[str, Flags(variables=("REDIS_URL",))] = Field(
        default="redis://127.0.0.1:6379/0",
        description="redis://, rediss://, unix:///path, redis+sentinel://h1:p1,h2:p2/name or redis+cluster://h1:p1,h2:p2.",
    )
    key_prefix: str = Field(default="headrace:", max_length=64, description="Prefix of every key and channel.")
    partitions: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Partitions of the key space; unset: as first started, which is 16 in a cluster and 1 elsewhere.",
    )
    durability: Literal["standard", "strict"] = Field(
        default="standard",
        description="strict: nothing is shown before it is on disk (appendfsync always) or on strict_replicas "
        "replicas.",
    )
    strict_replicas: int = Field(
        default=0,
        ge=0,
        le=8,
        description="Replicas that must acknowledge in strict mode: as many as can be promoted; 0 relies on "
        "appendfsync always.",
    )
    strict_wait_ms: int = Field(default=1000, ge=1, le=60_000, description="Longest wait for those replicas.")
    redis_connect_timeout_s: float = Field(default=2.0, gt=0, le=60, description="Time to connect.")
    redis_timeout_s: float = Field(default=5.0, gt=0, le=60, description="Time for one answer.")
    redis_retry_s: float = Field(default=5.0, ge=0, le=600, description="How long a call is retried over reconnects.")
    redis_max_connections: int = Field(default=32, ge=2, le=4096, description="Connections for commands, a process.")
    retention_s: int = Field(default=900, ge=1, le=604_800, description="How long an ended request stays readable.")
    request_ttl_s: int = Field(
        default=86_400, ge=60, le=2_592_000, description="Life of an accepted request that has no deadline."
    )
    reader_timeout_s: float = Field(
        default=30.0,
        ge=0.1,
        le=3600,
        description="A request without a sign of a reader for so long, plus its grace time, is orphaned.",
    )
    max_blob_bytes: int = Field(
        default=268_435_456, ge=1, le=536_870_912, description="Largest tokenizer file that a worker may register."
    )

    @property
    def reader_refresh_s(self) -> float:
        """How often an edge says that a request still has a reader."""
        return self.reader_timeout_s / 4
