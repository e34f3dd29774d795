"""Settings of logs, traces and metrics, shared by every process."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from common.config import Settings


class TelemetrySettings(Settings):
    """Logs and traces."""

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level written.")
    log_format: Literal["auto", "json", "pretty"] = Field(
        "auto", description="json: one object a line; pretty: for eyes; auto: pretty on a terminal, else json."
    )
    otlp_endpoint: str = Field(
        "",
        description="OTLP/HTTP receiver of traces, such as http://localhost:4318. Empty: what"
        " OTEL_EXPORTER_OTLP_ENDPOINT says, and without that no tracing.",
    )
    trace_sample_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of requests traced when the client's traceparent does not decide it."
    )


class MetricsServerSettings(Settings):
    """Where a process without an API of its own shows /metrics, /health and /ready."""

    metrics_host: str = Field("127.0.0.1", description="Address of the metrics listener.")
    metrics_port: int = Field(9100, ge=0, le=65535, description="Port of the metrics listener; 0 takes a free one.")
    metrics_engine: str = Field(
        "0", max_length=64, description="Label engine of a worker's metrics: tells workers apart that one page shows."
    )


class FederationSettings(Settings):
    """Workers whose metrics an edge shows with its own, for a laptop or an autoscaler that reads one address."""

    federate_metrics: tuple[str, ...] = Field(
        (),
        description="URLs of workers' /metrics that this edge appends to its own. Leave it empty where Prometheus"
        " scrapes the workers itself, or everything counts twice.",
    )
