"""Which groups of settings each process reads."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import Field

from common.config import Settings
from common.telemetry.settings import FederationSettings, MetricsServerSettings, TelemetrySettings
from common.transport.client import RedisSettings
from common.transport.embedded import EmbeddedSettings
from edge.config import ApiSettings, CatalogSettings, HttpSettings, LimitSettings, StreamSettings
from engine_worker.config import (
    ComputeSettings,
    KvCacheSettings,
    LeaseSettings,
    ModelSettings,
    SchedulerSettings,
    WorkerSettings,
)


class ServeSettings(Settings):
    """Everything on one machine."""

    workers: int = Field(1, ge=1, le=64, description="Engine workers, each with its own copy of the model.")
    edges: int = Field(1, ge=1, le=64, description="Edges; the first listens on --port, the others on the ports above.")
    state_dir: Path = Field(
        Path(".headrace"), description="Directory of the log, imported models and run files; locked while in use."
    )
    start_timeout_s: float = Field(600.0, gt=0, description="How long loading may take before serve gives up.")


class LocalLogSettings(Settings):
    """Whose log is read when no --redis-url is given."""

    state_dir: Path = Field(
        Path(".headrace"),
        description="State directory of a `headrace serve`, whose embedded log is read; one that does not run any more "
        "has its log started for that, and stopped again (not by `tail`, which waits for what happens).",
    )


SHARED: Final[tuple[type[Settings], ...]] = (RedisSettings, TelemetrySettings)
EDGE: Final[tuple[type[Settings], ...]] = (
    HttpSettings,
    ApiSettings,
    LimitSettings,
    StreamSettings,
    CatalogSettings,
    FederationSettings,
    *SHARED,
)
WORKER: Final[tuple[type[Settings], ...]] = (
    ModelSettings,
    ComputeSettings,
    SchedulerSettings,
    KvCacheSettings,
    WorkerSettings,
    LeaseSettings,
    MetricsServerSettings,
    *SHARED,
)
SERVE: Final[tuple[type[Settings], ...]] = (
    ServeSettings,
    *(group for group in WORKER if group not in (*SHARED, MetricsServerSettings)),
    *(group for group in EDGE if group not in (*SHARED, FederationSettings)),
    EmbeddedSettings,
    *SHARED,
)
LOG_READERS: Final[tuple[type[Settings], ...]] = (LocalLogSettings, EmbeddedSettings, RedisSettings)  # inspect, ...
ALL: Final[tuple[type[Settings], ...]] = tuple(dict.fromkeys((*SERVE, *WORKER, *EDGE, *LOG_READERS)))
