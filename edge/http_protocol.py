"""HTTP/1.1 as uvicorn speaks it, with bounds on what stands before a body.

`DirectBody` is a way past the layers of an answer, for those who write many small parts of a body.

A connection may take `HEAD_TIMEOUT_S` to send the head of a request and `MAX_HEAD_BYTES` for it: without these bounds
anybody, key or not, fills the memory or the descriptors of an edge with heads that never end.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    from asyncio.events import TimerHandle
    from collections.abc import Callable, Iterator

    from starlette.types import Scope
    from uvicorn._types import ASGI3Application
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

MAX_HEAD_BYTES: Final = 64 << 10
HEAD_TIMEOUT_S: Final = 30.0
_DIRECT: Final = "headrace.direct"


class _UntilClose(int):
    """The length of a body that the end of its connection ends; uvicorn counts down from it and wants 0 at the end."""

    def __lt__(self, other: object) -> bool:
        return False

    def __sub__(self, other: object) -> _UntilClose:
        return self

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class DirectBody:
    """Writes parts of an answer's body to its connection, at once and without a task. For use between two messages of
    the answer, from the event loop."""

    __slots__ = ("_cycle", "_on_hang_up", "num_bytes")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._on_hang_up: Callable[[], None] | None = None
        self.num_bytes = 0  # written, without the framing of the transfer

    @property
    def is_ready(self) -> bool:
        """The answer's head is out, in chunks, and the client takes what it gets. Else parts have to go the long way,
        which waits."""
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or cycle.response_complete:
            return False
        # A transport that has met an error takes no more, one turn of the loop before the cycle is told.
        return cycle.chunked_encoding is True and not cycle.transport.is_closing()

    def write(self, part: bytes) -> None:
        """One part, not empty, while the body `is_ready`."""
        self.num_bytes += len(part)
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    @contextmanager
    def watching(self, on_hang_up: Callable[[], None]) -> Iterator[None]:
        """Inside, ``on_hang_up`` is called when the client closes the connection: no task has to wait for it. The
        request's body must have been read."""
        cycle = self._cycle
        if cycle.disconnected:
            on_hang_up()
        else:
            cycle.flow.resume_reading()  # a large body may have paused it, and then no end would be seen
        self._on_hang_up = on_hang_up
        try:
            yield
        finally:
            self._on_hang_up = None

    def hung_up(self) -> None:
        """The connection is gone."""
        if self._on_hang_up is not None:
            self._on_hang_up()


def direct_body(scope: Scope) -> DirectBody | None:
    """The direct way to the answer of this request; None under another server or protocol."""
    return scope.get(_DIRECT)


class BoundedProtocol(HttpToolsProtocol):
    """Refuses heads that are malformed, too long or too slow, with an OpenAI error body, and closes the connection."""

    head_timeout_s = HEAD_TIMEOUT_S

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: TimerHandle | None = None
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        running = self._running
        if running is not None and not running.response_complete:
            # uvicorn tells the request that came last, which may still wait for the one that is being answered.
            running.disconnected = True
            running.message_event.set()
            direct: DirectBody | None = running.scope.get(_DIRECT)  # type: ignore[assignment]  # put there by us
            if direct is not None:
                direct.hung_up()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            self._stop_waiting()
        elif self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(431, "Request Header Fields Too Large", f"The head is longer than {MAX_HEAD_BYTES} bytes.")
        elif self._head_bytes and self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":  # knows no chunks, and gets a connection of its own
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _UntilClose()
        self.scope[_DIRECT] = DirectBody(self.cycle)  # type: ignore[typeddict-unknown-key]  # the cycle of this head

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0  # what follows in the same read is not counted; a read is bounded
        self._stop_waiting()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls for bytes that are not HTTP."""
        self._refuse(400, "Bad Request", msg)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.head_timeout_s, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_answering():  # the next request may take its time while this one is being answered
            self._await_head()
        elif self._head_bytes:
            self._refuse(408, "Request Timeout", f"The head did not arrive within {self.head_timeout_s:g} s.")
        else:
            self.transport.close()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, status: int, phrase: str, message: str) -> None:
        """Answers without the application; in the middle of another answer only the connection can end."""
        self._stop_waiting()
        if not self._is_answering():
            error = {"message": message, "type": "BadRequestError", "param": None, "code": "invalid_http"}
            body = json.dumps({"error": error}).encode()
            head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        self.transport.close()
