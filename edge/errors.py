"""One table from errors to HTTP answers. Whatever goes wrong, the body is OpenAI's error object.

An answer never shows the inside: errors that are not the client's business get a fixed text, and everything that is
echoed is bounded and free of control characters.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, field
from typing import Final

import msgspec

from common import errors
from common.errors import HeadraceError

MAX_MESSAGE_CHARS: Final = 2000
MAX_RETRY_AFTER_S: Final = 60  # clients give up, or ignore the header, above this
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


class Unauthorized(HeadraceError):
    """No key, or not one of ours."""

    code = "invalid_api_key"


class PathNotFound(HeadraceError):
    """No such route."""

    code = "path_not_found"


class MethodNotAllowed(HeadraceError):
    """The route exists, not with this method. ``allow`` lists those that do."""

    code = "method_not_allowed"

    def __init__(self, message: str, *, allow: str = "") -> None:
        super().__init__(message)
        self.allow = allow


class BodyTooLarge(HeadraceError):
    """The request body is over the limit."""

    code = "request_too_large"


class BodyTooSlow(HeadraceError):
    """The client did not send its body in time."""

    code = "request_timeout"


class Draining(errors.ModelUnavailable):
    """This edge is shutting down and takes nothing new."""

    code = "draining"


@dataclass(frozen=True, slots=True)
class _Row:
    """How one kind of error is shown. ``text`` replaces the error's own message; ``retry`` is x-should-retry."""

    status: int
    type: str
    text: str = ""
    retry: bool | None = None


_INTERNAL: Final = _Row(500, "InternalServerError", "The server could not handle this request.")

_TABLE: Final[dict[type[HeadraceError], _Row]] = {
    errors.InvalidRequest: _Row(400, "BadRequestError"),
    errors.ContextOverflow: _Row(400, "BadRequestError"),
    errors.UnsupportedParameter: _Row(400, "BadRequestError"),
    Unauthorized: _Row(401, "AuthenticationError"),
    errors.ModelNotFound: _Row(404, "NotFoundError"),
    PathNotFound: _Row(404, "NotFoundError"),
    MethodNotAllowed: _Row(405, "MethodNotAllowedError"),
    BodyTooSlow: _Row(408, "RequestTimeoutError", retry=False),
    errors.IdempotencyConflict: _Row(409, "ConflictError", retry=False),
    errors.StreamExpired: _Row(410, "GoneError"),
    BodyTooLarge: _Row(413, "RequestTooLargeError"),
    errors.Overloaded: _Row(429, "RateLimitError"),
    errors.TenantLimitReached: _Row(429, "RateLimitError", retry=False),
    errors.EngineError: _Row(500, "InternalServerError", retry=True),
    errors.WeightsChanged: _Row(503, "ServiceUnavailableError", retry=True),
    errors.Quarantined: _Row(500, "InternalServerError", retry=False),
    errors.ModelUnavailable: _Row(503, "ServiceUnavailableError"),
    Draining: _Row(503, "ServiceUnavailableError", retry=True),
    errors.LogUnavailable: _Row(503, "ServiceUnavailableError", "The request log cannot be reached; try again."),
    errors.DeadlineExceeded: _Row(504, "TimeoutError", retry=False),
}


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """A complete HTTP answer but for the headers that every answer gets."""

    status: int
    body: bytes
    code: str
    headers: dict[str, str] = field(default_factory=dict)


def error_answer(error: BaseException, request_id: str = "") -> ErrorAnswer:
    """The HTTP answer for any error; what is not in the table is a 500 with a fixed text."""
    row = _row(error)
    headers = {"Content-Type": "application/json"}
    retry_after_s = getattr(error, "retry_after_s", None)
    if retry_after_s is not None and row.status in (429, 503):
        headers["Retry-After"] = str(_retry_after(retry_after_s))
    if row.retry is not None:
        headers["x-should-retry"] = "true" if row.retry else "false"
    if isinstance(error, MethodNotAllowed) and error.allow:
        headers["Allow"] = error.allow
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return ErrorAnswer(row.status, error_document(error, request_id), _code(error), headers)


def error_document(error: BaseException, request_id: str = "") -> bytes:
    """``{"error": {...}}`` as JSON, for a body or for the last chunk of a stream."""
    row = _row(error)
    message = row.text or (error.message if isinstance(error, HeadraceError) else "")
    message = _CONTROL.sub(" ", message)
    if len(message) > MAX_MESSAGE_CHARS:
        message = message[:MAX_MESSAGE_CHARS] + "…"
    if request_id:
        message = f"{message} (request id: {request_id})"
    param = error.param if isinstance(error, HeadraceError) else None
    return msgspec.json.encode({"error": {"message": message, "type": row.type, "param": param, "code": _code(error)}})


def status_of(error: BaseException) -> int:
    """The HTTP status of an error."""
    return _row(error).status


def _row(error: BaseException) -> _Row:
    for kind in type(error).__mro__:
        row = _TABLE.get(kind)
        if row is not None:
            return row
    return _INTERNAL


def _code(error: BaseException) -> str:
    return error.code if isinstance(error, HeadraceError) and _row(error) is not _INTERNAL else "internal_error"


def _retry_after(seconds: float) -> int:
    """Whole seconds with up to a quarter of jitter: clients obey exactly, so a burst would come back as a burst."""
    jittered = seconds * (1.0 + random.random() / 4)
    return max(1, min(MAX_RETRY_AFTER_S, math.ceil(jittered)))
