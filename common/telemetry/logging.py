"""Logs: structlog, one JSON object a line (or coloured text on a terminal), with the request's identity on every line.

Foreign loggers (uvicorn, redis, opentelemetry) go through the same chain. Context is bound, not passed::

    with request_context("req_0192..."):
        log.info("request admitted", prompt_tokens=12)     # carries request_id, trace_id and span_id
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Final, TextIO

import msgspec
import structlog
from opentelemetry import trace
from structlog.typing import Processor

from common.telemetry.settings import TelemetrySettings
from common.telemetry.trace_ids import trace_id_hex

# Loggers that bring handlers of their own, or that talk about each request although we do.
_FOREIGN: Final = ("uvicorn", "uvicorn.error", "uvicorn.access", "asyncio", "opentelemetry")
_QUIET: Final = {"uvicorn.access": logging.WARNING, "httpx": logging.WARNING, "urllib3": logging.ERROR}

_encoder: Final = msgspec.json.Encoder(enc_hook=repr)


def configure_logging(service: str, settings: TelemetrySettings, *, stream: TextIO | None = None) -> None:
    """Send every log line of this process through one chain to ``stream`` (standard error). Call it once, at start.

    ``service`` ("edge", "worker", "serve") is on every line.
    """
    target = sys.stderr if stream is None else stream
    pretty = settings.log_format == "pretty" or (settings.log_format == "auto" and target.isatty())
    handler = logging.StreamHandler(target)
    handler.setFormatter(_formatter(service, pretty=pretty, colors=target.isatty()))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(settings.log_level.upper())
    for name in _FOREIGN:
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(level)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_shared(service),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """The logger of one module; usable before `configure_logging`."""
    logger: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return logger


@contextmanager
def request_context(request_id: str, *, trace: Mapping[str, str] | None = None, **bound: Any) -> Iterator[None]:
    """Bind a request's identity to every line logged inside, in this task and the tasks started from it.

    ``trace`` is the request's W3C context (``EngineRequest.trace``); without it the trace id follows from the request
    id (see `trace_ids`).
    """
    tokens = structlog.contextvars.bind_contextvars(
        request_id=request_id, trace_id=trace_id_hex(request_id, trace), **bound
    )
    try:
        yield
    finally:
        structlog.contextvars.reset_contextvars(**tokens)


def _shared(service: str) -> list[Processor]:
    def add_service(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["service"] = service
        return event

    return [
        structlog.contextvars.merge_contextvars,
        add_service,
        _add_span,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]


def _formatter(service: str, *, pretty: bool, colors: bool) -> logging.Formatter:
    # Tracebacks are plain: the library's own show the variables of each frame, what clients sent and keys among them,
    # and take seconds to draw.
    renderers: list[Processor] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=colors, pad_event_to=36, exception_formatter=structlog.dev.plain_traceback
            )
        ]
        if pretty
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]
    )
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_shared(service),
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
    )


def _add_span(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    span = trace.get_current_span().get_span_context()
    if span.is_valid:
        event["trace_id"] = f"{span.trace_id:032x}"
        event["span_id"] = f"{span.span_id:016x}"
    return event


def _to_json(event: Any, **_options: Any) -> str:
    return _encoder.encode(event).decode()
