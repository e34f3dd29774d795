"""One connection that many tasks share: commands go out as they come, answers come back in their order.

The library's pool gives each command a connection of its own, under locks and timers, in a dozen turns of the event
loop. Where a model has just swept the caches, each turn costs tens of microseconds, and a worker takes that way with
every step. Here a command is one write, and its answer wakes the task that waits for it.

The library still makes the connection: addresses, credentials, TLS, Sentinel.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any, Final, cast

import hiredis
import redis


class Line:
    """For commands that answer at once: one that blocks would keep all others waiting.

    A task that is cancelled gives up its answer; the connection lives on. Connects with the first command, and again
    with the first after a failure: once for all who wait for it, and also if they give up. Raises the library's errors.
    """

    def __init__(self, pool: Any, timeout_s: float) -> None:
        """``pool``: makes the connection. ``timeout_s``: time for an answer; beyond it the connection is given up."""
        self._pool = pool
        self._timeout_s = timeout_s
        self._connecting: asyncio.Task[_Answers] | None = None
        self._current: _Answers | None = None

    async def execute(self, *args: Any) -> Any:
        """The answer to one command, as the server gives it."""
        answers = self._current
        if answers is None or answers.is_retired:
            answers = await self._connected()
            if answers.is_retired:  # between two turns of the loop
                raise redis.ConnectionError("connection lost as soon as it was made")
        return await answers.to(hiredis.pack_command(args))

    def retire(self) -> None:
        """Connect anew for the next command; what is under way is still answered."""
        if self._current is not None:
            self._current.retire()

    async def close(self) -> None:
        """Close the connection and wait for it. No command may be under way."""
        if self._connecting is not None:
            await asyncio.wait({self._connecting})
        if self._current is not None:
            self._current.retire()
            await self._current.closed

    async def _connected(self) -> _Answers:
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
            self._connecting.add_done_callback(self._has_connected)
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> _Answers:
        connection = self._pool.make_connection()
        try:
            await connection.connect()
            if connection._reader.at_eof() or connection._writer.transport.is_closing():
                raise redis.ConnectionError("connection closed by server as soon as it was made")
        except BaseException:
            connection._close()
            raise
        self._current = _Answers(connection, self._timeout_s)
        return self._current

    def _has_connected(self, task: asyncio.Task[_Answers]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # everybody may have given up: then nobody else looks at it


class _Answers(asyncio.Protocol):
    """Takes a connection over from the library's stream reader."""

    def __init__(self, connection: Any, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        self._parser = hiredis.Reader(
            protocolError=redis.exceptions.InvalidResponse,
            replyError=connection._parser.parse_error,
            notEnoughData=_INCOMPLETE,
        )
        self._waiting: deque[tuple[asyncio.Future[Any], float]] = deque()  # with the time of sending
        self._loop = asyncio.get_running_loop()
        self._watch: asyncio.TimerHandle | None = None
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.is_retired = False
        self._transport = cast(asyncio.Transport, connection._writer.transport)
        self._transport.set_protocol(self)

    async def to(self, command: bytes) -> Any:
        """The answer to a packed command."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._waiting.append((answer, time.monotonic()))
        if self._watch is None:
            self._watch = self._loop.call_later(self._timeout_s, self._check_time)
        self._transport.write(command)
        return await answer

    def retire(self) -> None:
        """Take no new commands; close after the last answer."""
        self.is_retired = True
        if not self._waiting:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed(data)
            while (reply := self._parser.gets()) is not _INCOMPLETE:
                self._resolve(reply)
        except redis.exceptions.InvalidResponse as error:
            self._fail(redis.ConnectionError(f"what the server says is no answer: {error}"))
            self._transport.abort()
        if self.is_retired and not self._waiting:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_retired = True
        self._fail(redis.ConnectionError(f"connection closed by server: {exc or 'end of stream'}"))
        if self._watch is not None:
            self._watch.cancel()
        self._connection._close()  # the library's object, which would complain that it was forgotten
        if not self.closed.done():
            self.closed.set_result(None)

    def _resolve(self, reply: Any) -> None:
        if not self._waiting:
            raise redis.exceptions.InvalidResponse("an answer to nothing")
        answer, _ = self._waiting.popleft()
        if answer.done():
            return  # nobody waits any more
        if isinstance(reply, Exception):
            answer.set_exception(reply)
        else:
            answer.set_result(reply)

    def _check_time(self) -> None:
        """One timer for all: it is due when the oldest command may have waited too long."""
        self._watch = None
        if not self._waiting:
            return
        left_s = self._waiting[0][1] + self._timeout_s - time.monotonic()
        if left_s > 0:
            self._watch = self._loop.call_later(left_s, self._check_time)
            return
        self.is_retired = True
        self._fail(redis.TimeoutError(f"no answer within {self._timeout_s} s"))
        self._transport.abort()

    def _fail(self, error: Exception) -> None:
        while self._waiting:
            answer, _ = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(error)


_INCOMPLETE: Final = object()
