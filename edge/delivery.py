"""How a client wants its answer brought, as its headers say.

===========================  =========================================================================================
``X-Headrace-Resumable: 1``  positions (``id:`` lines) on the stream; the request outlives its reader by a grace time
``Last-Event-ID: N``         the same, and only what comes after position N (with ``Idempotency-Key``, or on the
                             stream's own path)
``X-Headrace-On-Disconnect`` ``cancel`` (the usual), or ``continue``: the request runs to its end without a reader
``X-Headrace-Priority``      a number, lower runs earlier; ``X-Vllm-Priority`` is understood too
``X-Headrace-Deadline-S``    seconds from arrival after which the answer is of no use; at most ``request_timeout_s``
``X-Headrace-Queue-Status``  1: place in the queue and estimated wait, in headers and in comments before the first token
===========================  =========================================================================================
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from common.errors import InvalidRequest
from edge.sse import parse_position

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from edge.config import StreamSettings

RUNS_WITHOUT_READER: Final = -1.0
MAX_PRIORITY: Final = 1 << 31
_TRUE: Final = frozenset({"1", "true", "yes", "on"})
_FALSE: Final = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Delivery:
    """``after`` events and ``after_chunks`` chunks of the next one were seen by the client; or ``skip_chunks`` chunks
    of a stream without positions. ``deadline_s``: seconds from arrival.

    ``grace_s``: how long the request may run without a reader; 0 = it ends with its reader, negative = never.
    """

    with_ids: bool = False
    after: int = 0
    after_chunks: int = 0
    grace_s: float = 0.0
    priority: int | None = None
    skip_chunks: int = 0
    deadline_s: float | None = None
    with_queue_status: bool = False
    named: str = "Last-Event-ID"  # where the client wrote its position

    @property
    def ends_with_reader(self) -> bool:
        return self.grace_s == 0

    @property
    def is_resumed(self) -> bool:
        return self.after > 0 or self.after_chunks > 0 or self.skip_chunks > 0


def delivery_of(headers: Headers, settings: StreamSettings, *, is_idempotent: bool) -> Delivery:
    """Raises `InvalidRequest` naming the header, also for a position on a POST that repeats nothing."""
    last_event_id = headers.get("last-event-id")
    after, after_chunks = position_of(last_event_id, "Last-Event-ID")
    if (after or after_chunks) and not is_idempotent:
        # Clients that repeat a POST by themselves send this. It would begin another generation, whose end would be
        # taken for the end of the first.
        raise InvalidRequest(
            "a POST goes on at a position only with the Idempotency-Key of the request that it repeats; "
            "without one, use GET /v1/streams/REQUEST_ID",
            param="Last-Event-ID",
        )
    with_ids = last_event_id is not None or _header_flag(headers, "X-Headrace-Resumable")
    on_disconnect = headers.get("x-headrace-on-disconnect", "cancel").lower()
    if on_disconnect not in ("cancel", "continue"):
        raise InvalidRequest("X-Headrace-On-Disconnect must be cancel or continue", param="X-Headrace-On-Disconnect")
    if on_disconnect == "continue":
        grace_s = RUNS_WITHOUT_READER
    else:
        # A repeated POST with the same key attaches again, so a keyed request is as resumable as one with ids.
        grace_s = settings.resume_grace_s if with_ids or is_idempotent else 0.0
    return Delivery(
        with_ids=with_ids,
        after=after,
        after_chunks=after_chunks,
        grace_s=grace_s,
        priority=_priority(headers),
        deadline_s=_deadline_s(headers),
        with_queue_status=_header_flag(headers, "X-Headrace-Queue-Status"),
    )


def position_of(text: str | None, name: str) -> tuple[int, int]:
    """A position that a client gave; (0, 0) for none. Raises `InvalidRequest`."""
    if text is None or not text.strip():
        return 0, 0
    try:
        return parse_position(text)
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}", param=name) from error


def count_of(text: str, name: str) -> int:
    """A number of chunks that a client gave. Raises `InvalidRequest`."""
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise InvalidRequest(f"{name}: must be the number of chunks read so far", param=name)
    return int(text)


def flag_of(text: str, name: str) -> bool:
    """A yes or no that a client gave. Raises `InvalidRequest`."""
    if text.lower() not in _TRUE | _FALSE:
        raise InvalidRequest(f"{name}: must be true or false", param=name)
    return text.lower() in _TRUE


def _header_flag(headers: Headers, name: str) -> bool:
    return flag_of(headers.get(name) or "false", name)


def _deadline_s(headers: Headers) -> float | None:
    text = headers.get("x-headrace-deadline-s")
    if text is None:
        return None
    try:
        seconds = float(text[:20])
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InvalidRequest("a deadline is a number of seconds above 0", param="X-Headrace-Deadline-S")
    return seconds


def _priority(headers: Headers) -> int | None:
    text = headers.get("x-headrace-priority", headers.get("x-vllm-priority"))
    if text is None:
        return None
    try:
        priority = int(text[:20])
    except ValueError as error:
        raise InvalidRequest("a priority is a whole number", param="X-Headrace-Priority") from error
    if abs(priority) >= MAX_PRIORITY:
        raise InvalidRequest("the priority is out of range", param="X-Headrace-Priority")
    return priority
