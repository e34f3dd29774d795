"""Where a request is refused or fails: every error on the way becomes one answer, or cuts a stream that has begun."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from starlette.responses import Response
from starlette.routing import Match

from common.errors import HeadraceError, Overloaded
from common.telemetry.logging import get_logger
from edge.errors import MethodNotAllowed, PathNotFound, error_answer
from edge.request_context import context_of
from edge.sse import StreamCut

if TYPE_CHECKING:
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from common.telemetry.metrics import EdgeMetrics
    from edge.limits import Occupancy

_METHODS: Final = ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT")
_OUR_PATHS: Final = ("chat/completions", "completions", "models", "streams")
logger = get_logger(__name__)


class ClientGone(Exception):
    """The client has closed its connection; there is nobody to answer."""


class ErrorBoundary:
    """Plain ASGI. Behind it an error is raised; in front of it there are only answers."""

    def __init__(self, app: ASGIApp, *, occupancy: Occupancy, metrics: EdgeMetrics) -> None:
        self._app = app
        self._occupancy = occupancy
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        context = context_of(scope)
        has_begun = False

        async def watched(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            if context.refusal is not None:
                raise context.refusal
            with nullcontext() if context.is_probe else self._occupancy.request():
                await self._app(scope, receive, watched)
        except ClientGone:
            context.outcome.setdefault("outcome", "cancelled")
        except Exception as error:
            if has_begun:
                # Returning without the end of the answer makes the server cut the connection: a clean end would
                # make half an answer look whole.
                logger.warning(
                    "answer cut", error=repr(error), exc_info=not isinstance(error, HeadraceError | StreamCut)
                )
                return
            await self._refuse(error, scope, receive, send)

    async def _refuse(self, error: Exception, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        answer = error_answer(error, context.shown_id)
        if answer.status >= 500 and not isinstance(error, HeadraceError):
            logger.error("request failed", exc_info=error)
        # Other errors have reasons too, which quote what the client sent: that must never become a label.
        self._metrics.rejections.labels(error.reason if isinstance(error, Overloaded) else answer.code).inc()
        context.outcome.setdefault("outcome", "shed" if answer.status in (429, 503) else "error")
        context.outcome["error_code"] = answer.code
        context.outcome["error"] = str(error)[:500]
        await Response(answer.body, answer.status, answer.headers)(scope, receive, send)


async def raise_as_ours(request: Request, error: Exception) -> Response:
    """Handler for the framework's own errors (no such path, wrong method): raises ours instead."""
    http_error: HTTPException = error  # type: ignore[assignment]  # registered for HTTPException only
    path = request.url.path[:200]
    if http_error.status_code == 405:
        allow = ", ".join(_allowed_methods(request))
        raise MethodNotAllowed(f"{request.method} is not allowed for {path}; allowed: {allow}", allow=allow)
    raise PathNotFound(f"There is no {path} here{_hint(path)}")


def _allowed_methods(request: Request) -> list[str]:
    """Those that any route of the path takes: the framework itself names those of the first route only."""
    return [
        method
        for method in _METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]


def _hint(path: str) -> str:
    """The commonest mistake is a base URL without /v1, or with it twice."""
    tail = path.removeprefix("/v1").lstrip("/").removeprefix("v1/")
    for ours in _OUR_PATHS:
        if tail == ours or tail.startswith(f"{ours}/"):
            return f". Did you mean /v1/{ours}?"
    return ". The API lives under /v1/, for example /v1/chat/completions."
