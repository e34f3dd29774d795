"""One subscribed connection whose messages go to a function as they are read: no task wakes up between a socket and who
listens, which is what every token of a lone stream would pay for.

The library makes the connection, as for `common.transport.line`: addresses, credentials, TLS, Sentinel.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, cast

import hiredis
import redis

from common.transport.failures import heeding_cancellation

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.transport.connections import PushSource

_LOOK_S: Final = 2.0
_SILENCE_S: Final = 8.0  # then the connection is asked whether it still lives
_ANSWER_S: Final = 10.0  # and so long it may take to answer
_INCOMPLETE: Final = object()


class SubscriptionLost(Exception):
    """It has to be made anew."""


async def listen(source: PushSource, *, confirmed: Callable[[], None], message: Callable[[bytes], None]) -> None:
    """Listens to the channels until the subscription is lost or the task cancelled.

    ``confirmed`` is called when the server has accepted one of the channels, ``message`` with what was published. Both
    are called between two turns of the event loop and must not raise.

    Raises `SubscriptionLost`, and what the library raises when it cannot connect.
    """
    connection = source.client.connection_pool.make_connection()
    try:
        await heeding_cancellation(connection.connect())
    except BaseException:
        connection._close()
        raise
    messages = _Messages(connection, confirmed, message)
    try:
        messages.subscribe(source)
        while True:
            await asyncio.wait({messages.lost}, timeout=_LOOK_S)
            messages.check()
    finally:
        messages.abort()


class _Messages(asyncio.Protocol):
    """Takes a connection over from the library's stream reader."""

    def __init__(self, connection: Any, confirmed: Callable[[], None], message: Callable[[bytes], None]) -> None:
        self._connection = connection
        self._confirmed = confirmed
        self._message = message
        self._parser = hiredis.Reader(
            protocolError=redis.exceptions.InvalidResponse,
            replyError=connection._parser.parse_error,
            notEnoughData=_INCOMPLETE,
        )
        self._loop = asyncio.get_running_loop()
        self._heard_at = self._loop.time()
        self._asked_at: float | None = None  # nothing was heard since
        self.lost: asyncio.Future[str] = self._loop.create_future()
        """Why, when it is."""
        self._transport = cast(asyncio.Transport, connection._writer.transport)
        self._transport.set_protocol(self)

    def subscribe(self, source: PushSource) -> None:
        """Names of one sharded command would have to share a slot."""
        if source.is_sharded:
            for name in source.channels:
                self._transport.write(hiredis.pack_command(("SSUBSCRIBE", name)))
        else:
            self._transport.write(hiredis.pack_command(("SUBSCRIBE", *source.channels)))

    def check(self) -> None:
        """To be called now and then. Raises `SubscriptionLost`."""
        if self.lost.done():
            raise SubscriptionLost(self.lost.result())
        now = self._loop.time()
        if self._asked_at is not None:
            if now - self._asked_at >= _ANSWER_S:
                raise SubscriptionLost(f"no answer for {now - self._asked_at:.0f} s")
        elif now - self._heard_at >= _SILENCE_S:
            self._asked_at = now
            self._transport.write(hiredis.pack_command(("PING",)))

    def abort(self) -> None:
        self._lose("closed")
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._heard_at, self._asked_at = self._loop.time(), None
        try:
            self._parser.feed(data)
            while (reply := self._parser.gets()) is not _INCOMPLETE:
                self._take(reply)
        except redis.exceptions.InvalidResponse as error:
            self._lose(f"what the server says is no message: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(f"connection closed by server: {exc or 'end of stream'}")
        self._connection._close()  # the library's object, which would complain that it was forgotten

    def _take(self, reply: Any) -> None:
        match reply:
            case [b"message" | b"smessage", _, payload] if not self.lost.done():
                self._message(payload)
            case [b"subscribe" | b"ssubscribe", *_]:
                self._confirmed()
            case [b"unsubscribe" | b"sunsubscribe", *_]:  # the slot has moved to another node
                self._lose("the server ended the subscription")
            case Exception():
                self._lose(f"the server refuses: {reply}")
            case _:
                pass  # an answer to a ping

    def _lose(self, why: str) -> None:
        if not self.lost.done():
            self.lost.set_result(why)
