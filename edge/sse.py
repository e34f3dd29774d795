"""Server-sent events as OpenAI's clients can read them; the only module that sees sse_starlette.

Two forms of stream, measured against the clients in use:

* bare: nothing but ``data: {json}`` blocks, LF only. A keep-alive is a block of its own, ``: ping`` and an empty line.
  An ``id:``, ``event:`` or ``retry:`` line, or CRLF, breaks benchmark tools that read line by line.
* with ids: each block carries ``id:``. Here a keep-alive is one line *without* an empty line after it: after the first
  id, any block without data makes OpenAI's Python client parse an empty document.

A stream never ends cleanly without its last word: when the body raises `StreamCut` the connection is cut, so that no
client takes half an answer for a whole one.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

from sse_starlette.sse import AppStatus, EventSourceResponse, SendTimeoutError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from starlette.types import Receive, Scope, Send

    from edge.config import StreamSettings
    from edge.http_protocol import DirectBody

# The library would end every stream the moment SIGTERM arrives; the edge drains its streams itself.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]

PING_BARE: Final = b": ping\n\n"
PING_WITH_IDS: Final = b": ping\n"
HANDED_OVER: Final = b": headrace resume\nretry: 200\n"
"""Last words on a stream with ids that goes on at another edge; an EventSource comes back after so many ms. No empty
line follows: see above."""


class StreamCut(Exception):
    """The stream cannot be ended well: the connection shall be cut, without the final chunk of the transfer."""


class StreamHandedOver(StreamCut):
    """As meant: the client has been told to go on at another edge."""


def frame_bare(chunks: Sequence[bytes]) -> bytes:
    """One write for several JSON documents."""
    return b"".join([b"data: " + chunk + b"\n\n" for chunk in chunks])


def frame_with_ids(n: int, chunks: Sequence[bytes], *, first: int = 0) -> bytes:
    """All chunks of event ``n``, each with the position after it, from chunk number ``first`` (0-based) on.

    The last chunk's id is ``n``; chunk k of several before it has ``n.k``: everything before event n, and k chunks of
    it, were seen.
    """
    last = len(chunks)
    lines = []
    for k, chunk in enumerate(chunks, start=1):
        if k > first:
            position = b"%d" % n if k == last else b"%d.%d" % (n, k)
            lines.append(b"id: " + position + b"\ndata: " + chunk + b"\n\n")
    return b"".join(lines)


def parse_position(text: str) -> tuple[int, int]:
    """``Last-Event-ID`` to (events seen completely, chunks seen of the next one). Raises `ValueError`."""
    n_text, dot, k_text = text.strip().partition(".")
    if not (n_text.isascii() and n_text.isdigit() and len(n_text) <= 18):
        raise ValueError("a position is a number such as 17 or 17.1")
    n = int(n_text)
    if not dot:
        return n, 0
    if not (k_text.isascii() and k_text.isdigit() and len(k_text) <= 9 and n >= 1):
        raise ValueError("a position is a number such as 17 or 17.1")
    return n - 1, int(k_text)


class EventStream(EventSourceResponse):
    """An ASGI response that writes ``body`` as server-sent events.

    ``on_close`` is called exactly once when the response is over in whatever way: completed, reader gone, cancelled
    before the first byte. It must not block.

    With ``direct`` and ``on_hang_up``, which makes ``body`` raise, the connection itself calls when it is lost, and a
    timer writes the pings: the library has a task for each of these, and one more for shutting down.
    """

    def __init__(
        self,
        body: AsyncGenerator[bytes, None],
        settings: StreamSettings,
        *,
        with_ids: bool,
        headers: dict[str, str],
        on_close: Callable[[], None],
        on_hang_up: Callable[[], None] | None = None,
        direct: DirectBody | None = None,
    ) -> None:
        ping = PING_WITH_IDS if with_ids else PING_BARE
        self._body = body
        super().__init__(
            body,
            headers={"Cache-Control": "no-cache", **headers},
            sep="\n",
            ping=settings.ping_interval_s,
            ping_message_factory=lambda: ping,  # type: ignore[arg-type,return-value]  # bytes pass through as they are
            send_timeout=settings.send_timeout_s,
        )
        self._on_close = on_close
        self._on_hang_up = on_hang_up
        self._direct = direct
        self._ping_bytes = ping
        self._timer: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `StreamCut` when the body does, or when the reader takes nothing for the send time-out."""
        try:
            if self._direct is not None and self._on_hang_up is not None and scope.get("http_version") != "1.0":
                with self._direct.watching(self._on_hang_up):
                    await self._write(send)
            else:
                await super().__call__(scope, receive, send)
        except StreamHandedOver:
            pass  # returning without the end of the answer cuts the connection
        except SendTimeoutError as error:
            raise StreamCut("the reader took nothing for too long") from error
        finally:
            self._on_close()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        self._ping_later()
        try:
            async with aclosing(self._body) as body:
                async for block in body:
                    message = {"type": "http.response.body", "body": block, "more_body": True}
                    await self._send_with_timeout(send, message)
        finally:
            if self._timer is not None:
                self._timer.cancel()
        # In the same turn of the loop as the last block, so that both are one write to the socket.
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _ping_later(self) -> None:
        if self.ping_interval:
            self._timer = asyncio.get_running_loop().call_later(self.ping_interval, self._ping_now)

    def _ping_now(self) -> None:
        """A client that is behind needs none: it has something to read."""
        if self._direct is not None and self._direct.is_ready:
            self._direct.write(self._ping_bytes)
        self._ping_later()
