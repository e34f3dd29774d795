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

from typing import TYPE_CHECKING, Final

from sse_starlette.sse import AppStatus, EventSourceResponse, SendTimeoutError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from starlette.types import Receive, Scope, Send

    from edge.config import StreamSettings

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
    """

    def __init__(
        self,
        body: AsyncIterator[bytes],
        settings: StreamSettings,
        *,
        with_ids: bool,
        headers: dict[str, str],
        on_close: Callable[[], None],
    ) -> None:
        ping = PING_WITH_IDS if with_ids else PING_BARE
        super().__init__(
            body,
            headers={"Cache-Control": "no-cache", **headers},
            sep="\n",
            ping=settings.ping_interval_s,
            ping_message_factory=lambda: ping,  # type: ignore[arg-type,return-value]  # bytes pass through as they are
            send_timeout=settings.send_timeout_s,
        )
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `StreamCut` when the body does, or when the reader takes nothing for the send time-out."""
        try:
            await super().__call__(scope, receive, send)
        except StreamHandedOver:
            pass  # returning without the end of the answer cuts the connection
        except SendTimeoutError as error:
            raise StreamCut("the reader took nothing for too long") from error
        finally:
            self._on_close()
