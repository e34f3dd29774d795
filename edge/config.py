"""Settings of the edge, grouped by the part that uses them. An edge needs none of them, only a Redis URL."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, SecretStr, field_validator

from common.config import Flags, Settings

_WEIGHTS: Final = (0.001, 1000.0)


class HttpSettings(Settings):
    """Where the edge listens."""

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 for all of this machine.")
    port: int = Field(8000, ge=0, le=65535, description="TCP port to listen on; 0 takes a free one.")
    uds: str = Field("", description="Unix socket to listen on instead of host and port.")
    root_path: str = Field("", description="Path prefix under which a proxy shows this server, such as /llm.")
    reuse_port: bool = Field(
        False, description="Let several edge processes listen on the same port; the kernel spreads connections."
    )
    keep_alive_timeout_s: int = Field(75, ge=1, le=3600, description="Seconds an idle connection is kept open.")
    listen_backlog: int = Field(2048, ge=1, le=65535, description="Connections the kernel may hold before accept.")


class ApiSettings(Settings):
    """Who may call, and what the API offers."""

    api_keys: Annotated[tuple[SecretStr, ...], Flags(flags=("--api-key",), variables=("HEADRACE_API_KEY",))] = Field(
        (), description="Accepted bearer keys; none means that no key is needed."
    )
    api_key_file: str = Field("", description="File with one accepted key a line; read once at start.")
    metrics_need_key: bool = Field(False, description="Guard /metrics by the keys too.")
    cors_origins: Annotated[tuple[str, ...], Flags(flags=("--allowed-origins",))] = Field(
        (), description="Origins of browser applications; * allows all."
    )
    docs: bool = Field(True, description="Serve /docs and /openapi.json.")
    compat: bool = Field(
        False, description="Ignore (log and count) parameters that are not supported; otherwise they are refused, 400."
    )
    served_model_default: str = Field(
        "", description="Model of requests that name none; empty: the only model there is, else 400."
    )


class LimitSettings(Settings):
    """Bounds on what clients may ask for. Each answers 413, 429 or 503 when it is reached."""

    max_body_bytes: int = Field(4 << 20, ge=1024, description="Largest request body.")
    max_connections: int = Field(8192, ge=1, description="Open requests of one edge process; more are refused.")
    max_streams: int = Field(4096, ge=1, description="Generations in progress at one edge process.")
    max_streams_per_tenant: int = Field(
        0, ge=0, description="Generations in progress for one API key at one edge process; 0 = no bound of its own."
    )
    max_tenant_bytes: int = Field(
        1 << 30,
        ge=0,
        description="Bytes of request bodies, and of events that readers have not taken, held for one API key at one "
        "edge process. More bodies are refused; events beyond it are read again from the log. 0 = no bound.",
    )
    max_queued_requests: int = Field(1024, ge=1, description="Admitted and unfinished requests of one model.")
    max_queued_tokens: int = Field(
        4_000_000, ge=1, description="Prompt and budgeted output tokens of a model's admitted, unfinished requests."
    )
    max_tenant_queued_requests: int = Field(
        0, ge=0, description="Admitted and unfinished requests of one API key and model, at all edges; 0 = no bound."
    )
    max_tenant_queued_tokens: int = Field(
        0, ge=0, description="Prompt and budgeted output tokens of those requests; 0 = no bound."
    )
    tenant_weights: dict[str, float] = Field(
        default_factory=dict,
        description="Share of each tenant of a model that others want too, as a=2,b=0.5 (0.001 to 1000); tenants not "
        "named weigh 1. A key's tenant is the first 12 digits of the SHA-256 of 'headrace tenant:' and the key.",
    )
    max_choices: int = Field(128, ge=1, description="Prompts times n of one request.")
    max_prompts: int = Field(1024, ge=1, description="Prompts of one request.")
    max_logprobs: int = Field(20, ge=0, description="Alternatives a client may ask for at each position.")
    max_concurrent_renders: int = Field(
        2, ge=1, le=64, description="Prompts rendered and tokenised at once (threads beside the event loop)."
    )
    request_timeout_s: float = Field(
        600.0, gt=0, description="Deadline of a request that does not bring an earlier one, in seconds from arrival."
    )
    body_timeout_s: float = Field(30.0, gt=0, description="Longest a client may take to send its body.")

    @field_validator("tenant_weights", mode="before")
    @classmethod
    def _parse_weights(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        pairs = [item.strip().partition("=") for item in value.split(",") if item.strip()]
        if any(not sign for _, sign, _ in pairs):
            raise ValueError("should be tenant=weight pairs, such as a=2,b=0.5")
        return {tenant: weight for tenant, _, weight in pairs}

    @field_validator("tenant_weights")
    @classmethod
    def _check_weights(cls, weights: dict[str, float]) -> dict[str, float]:
        least, most = _WEIGHTS
        for tenant, weight in weights.items():
            if not least <= weight <= most:
                raise ValueError(f"the weight of {tenant!r} must be from {least:g} to {most:g}")
        return weights


class StreamSettings(Settings):
    """How streams are written and how patient the edge is with their readers."""

    ping_interval_s: float = Field(15.0, ge=0, description="Seconds between keep-alive comments; 0 = none.")
    first_frame_hold_s: float = Field(
        1.5,
        ge=0,
        description="Longest the 200 of a stream waits for the first output, so that early failures are HTTP errors.",
    )
    reader_buffer_events: int = Field(
        256, ge=1, description="Events kept for a slow reader; beyond it the edge reads them again from the log."
    )
    send_timeout_s: float = Field(
        300.0, gt=0, description="A reader that takes nothing for so long counts as disconnected."
    )
    quiet_check_s: float = Field(0.7, gt=0, description="A request without news for so long is looked up in the log.")
    log_outage_s: float = Field(
        120.0, gt=0, description="How long open streams wait for a log that cannot be reached before they fail."
    )
    resume_grace_s: float = Field(
        30.0, ge=0, description="How long a resumable request goes on without a reader before it is cancelled."
    )
    drain_notice_s: float = Field(
        2.0, ge=0, description="After SIGTERM, seconds of failing readiness in which everything is still served."
    )
    drain_timeout_s: float = Field(
        60.0, ge=0, description="After SIGTERM, seconds that running streams may take to finish."
    )
    drain_handover: bool = Field(
        True,
        description="After SIGTERM, send readers that can resume to other edges at once; off, their streams are "
        "finished like all others. In serve, whose edges all stop together, it is off unless given.",
    )


class CatalogSettings(Settings):
    """What the edge keeps of the models that workers registered."""

    catalog_refresh_s: float = Field(1.0, gt=0, description="Seconds between looks at the registry of models.")
    tokenizer_cache: int = Field(8, ge=1, description="Tokenizers kept in memory.")
    no_worker_grace_s: float = Field(
        30.0,
        ge=0,
        description="How long requests are still accepted and queued after a model's last worker has gone. Then new "
        "ones are 503, and queued ones that no worker has begun end with model_unavailable.",
    )
    accept_without_worker: bool = Field(
        False, description="The same without an end, also for a model that has had no worker yet."
    )
    tool_call_parser: str = Field(
        "", description="How models write tool calls (hermes, llama3_json, mistral); empty: seen from the template."
    )
    reasoning_parser: str = Field(
        "", description="How models mark their reasoning (think, none); empty: seen from the template."
    )
