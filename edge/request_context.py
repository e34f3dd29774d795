"""Who is asking, and what became of it: identity, one span, one log line and the HTTP metrics of every request.

The request id (``<partition>-<uuid>``) is ours and unique; with an ``Idempotency-Key`` it follows from the key, so that
every edge finds the same request. A client's ``X-Request-Id`` is a label: it is echoed and logged, and two requests may
carry the same one. ``X-Request-Id`` stands on every answer; when it is the client's label, ``X-Headrace-Request-Id``
names ours.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers, MutableHeaders

from common.errors import HeadraceError, InvalidRequest
from common.telemetry.logging import get_logger, request_context
from common.transport import idempotent_request_id, new_request_id
from edge.errors import Unauthorized
from edge.http_protocol import direct_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.trace import Span
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from common.telemetry.metrics import EdgeMetrics
    from common.telemetry.tracing import Tracing
    from edge.auth import ApiKeys

STATUS_CLIENT_GONE: Final = 499  # for logs and metrics: nobody was there to be answered
UNMATCHED: Final = "unmatched"
# Neither traced nor counted, and answered by a server that is full.
PROBES: Final = frozenset({"/health", "/ready", "/ping", "/metrics", "/version"})

_LABEL: Final = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")
_IDEMPOTENCY_KEY: Final = re.compile(r"[\x21-\x7e]{1,255}")
_CONTEXT: Final = "headrace.context"
_log = get_logger(__name__)


@dataclass(slots=True)
class RequestContext:
    """One HTTP request. Owned by the task that serves it."""

    request_id: str
    label: str  # the client's own id; empty when it sent none that is acceptable
    tenant: str
    refusal: HeadraceError | None  # why it must not be served; raised behind the CORS headers
    is_idempotent: bool
    is_probe: bool
    arrival_s: float  # unix time
    started: float  # monotonic
    span: Span | None = None
    outcome: dict[str, Any] = field(default_factory=dict)  # fields of the one log line

    @property
    def shown_id(self) -> str:
        """The id that the client sees."""
        return self.label or self.request_id

    def elapsed_s(self) -> float:
        return time.perf_counter() - self.started


def context_of(scope: Scope) -> RequestContext:
    """The context of a request that came through `RequestIdentity`."""
    context: RequestContext = scope[_CONTEXT]
    return context


class RequestIdentity:
    """The outermost middleware; plain ASGI, so that streams pass through it untouched."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        root_path: str,
        keys: ApiKeys,
        partitions: Callable[[], int],
        metrics: EdgeMetrics,
        tracing: Tracing,
    ) -> None:
        self._app = app
        self._root_path = root_path
        self._keys = keys
        self._partitions = partitions
        self._metrics = metrics
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope["root_path"] = self._root_path  # routing takes paths with this prefix and without it
        path = scope["path"].removeprefix(self._root_path)
        context = scope[_CONTEXT] = self._identify(scope["method"], path, headers)
        answer = _Answer(send, context)
        label = {"client_request_id": context.label} if context.label else {}
        with request_context(context.request_id, trace=headers, **label):
            if context.is_probe:
                await self._app(scope, receive, answer.send)
                return
            with self._tracing.request(scope["method"], context.request_id, headers) as span:
                context.span = span
                await self._app(scope, receive, answer.send)
                self._conclude(scope, context, answer)

    def _identify(self, method: str, path: str, headers: Headers) -> RequestContext:
        label = headers.get("x-request-id", "")
        tenant = ""
        refusal: HeadraceError | None = None
        if not self._keys.is_open(method, path):
            try:
                tenant = self._keys.tenant_of(headers.get("authorization"))
            except Unauthorized as error:
                refusal = error
        key = headers.get("idempotency-key")
        if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
            key = None
            refusal = refusal or InvalidRequest(
                "an Idempotency-Key has 1 to 255 visible ASCII characters", param="Idempotency-Key"
            )
        partitions = self._partitions()
        return RequestContext(
            request_id=idempotent_request_id(tenant, key, partitions) if key else new_request_id(partitions),
            label=label if _LABEL.fullmatch(label) else "",
            tenant=tenant,
            refusal=refusal,
            is_idempotent=key is not None,
            is_probe=path in PROBES,
            arrival_s=time.time(),
            started=time.perf_counter(),
        )

    def _conclude(self, scope: Scope, context: RequestContext, answer: _Answer) -> None:
        handler, method = _handler(scope), scope["method"]
        seconds = context.elapsed_s()
        direct = direct_body(scope)
        num_bytes = answer.num_bytes + (direct.num_bytes if direct is not None else 0)
        status = answer.status or STATUS_CLIENT_GONE
        self._metrics.http_requests.labels(handler, method, f"{status // 100}xx").inc()
        self._metrics.http_duration.labels(handler, method).observe(seconds)
        self._metrics.http_duration_fine.observe(seconds)
        self._metrics.http_request_size.labels(handler).observe(_announced_size(scope))
        self._metrics.http_response_size.labels(handler).observe(num_bytes)
        if context.span is not None:
            context.span.update_name(f"{method} {handler}")
            context.span.set_attribute("http.request.method", method)
            context.span.set_attribute("http.route", handler)
            context.span.set_attribute("http.response.status_code", status)
        _log.info(
            "request served",
            method=method,
            route=handler,
            status=status,
            duration_s=round(seconds, 4),
            bytes=num_bytes,
            **context.outcome,
        )


class _Answer:
    """Watches one answer go by: puts the ids on it, remembers its status and counts its bytes."""

    __slots__ = ("_context", "_send", "num_bytes", "status")

    def __init__(self, send: Send, context: RequestContext) -> None:
        self._send = send
        self._context = context
        self.status = 0
        self.num_bytes = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            self.num_bytes += len(message.get("body", b""))
        elif message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self._context.shown_id
            if self._context.label:
                headers["X-Headrace-Request-Id"] = self._context.request_id
            span = self._context.span.get_span_context() if self._context.span is not None else None
            if span is not None and span.is_valid:
                headers["traceresponse"] = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
        await self._send(message)


def _handler(scope: Scope) -> str:
    """The route's template, never the path: paths are made up by clients."""
    return str(getattr(scope.get("route"), "path", UNMATCHED))


def _announced_size(scope: Scope) -> int:
    size = Headers(scope=scope).get("content-length", "0")
    return int(size) if size.isdigit() else 0
