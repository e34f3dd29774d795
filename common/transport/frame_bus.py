"""The push channel of an edge: one subscription (one per node in a cluster) that heals itself and says so."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, TypeAlias

from common.errors import LogCorrupt, LogUnavailable
from common.transport.client import LogClient
from common.transport.failures import TRANSIENT, RedisError
from common.transport.frames import channels, decode_frames
from common.transport.records import Frame, Resubscribed
from common.transport.subscription import SubscriptionLost, listen

_log = logging.getLogger(__name__)
_PAUSE_S: Final = 0.05
_BACKLOG: Final = 10_000  # messages; a message is one step of one worker
Signal: TypeAlias = Resubscribed | tuple[Frame, ...]


class FrameBus:
    """The one push connection of an edge. A frame is a hint: it may be lost or repeated, never invented.

    Signals are `Resubscribed` (first of all too, and after every reconnection) and tuples of frames, for ever;
    connection loss is handled inside. They go to a function, by `run`, or are iterated over: ``async with
    FrameBus(client, edge_id) as bus: async for signal in bus: ...``; who then falls far behind loses the backlog and
    gets `Resubscribed` instead.
    """

    def __init__(self, client: LogClient, edge_id: str) -> None:
        self._client = client
        self._channels = channels(client, edge_id)
        self._signals: asyncio.Queue[Signal] = asyncio.Queue()
        self._take: Callable[[Signal], None] = self._keep
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FrameBus:
        self._task = asyncio.create_task(self.run(self._keep), name="frame-bus")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def __aiter__(self) -> AsyncIterator[Signal]:
        while True:
            yield await self._signals.get()

    async def run(self, take: Callable[[Signal], None]) -> None:
        """Until cancelled. ``take`` is called with each signal as it is read from its socket; an error that it raises
        costs the connection."""
        self._take = take
        while True:
            generation, cause = self._client.generation, Exception("the subscription ended")
            try:
                sources = self._client.connections.push_sources(self._channels)
                async with asyncio.TaskGroup() as group:
                    confirmed = _Countdown(len(self._channels), self._resubscribed)
                    for source in sources:
                        group.create_task(listen(source, confirmed=confirmed.one_more, message=self._frames))
            except* (*TRANSIENT, RedisError, SubscriptionLost) as errors:
                cause = errors.exceptions[0]
                _log.info("push subscription lost: %s", cause)
            with contextlib.suppress(LogUnavailable):
                # Shares the reconnection of everybody else, and learns new addresses.
                await self._client.reconnected(generation, cause)
            await asyncio.sleep(_PAUSE_S)

    def _frames(self, data: bytes) -> None:
        try:
            frames = decode_frames(data)
        except LogCorrupt as error:
            _log.error("%s", error)
            return
        self._take(frames)

    def _resubscribed(self) -> None:
        self._take(Resubscribed())

    def _keep(self, signal: Signal) -> None:
        """For who iterates."""
        is_new = isinstance(signal, Resubscribed)
        if is_new or self._signals.qsize() >= _BACKLOG:
            while not self._signals.empty():  # whatever waits there is read from the log anyway
                self._signals.get_nowait()
            self._signals.put_nowait(Resubscribed())
        if not is_new:
            self._signals.put_nowait(signal)


class _Countdown:
    """Calls once when ``count`` things have happened, and for each one that comes later."""

    def __init__(self, count: int, done: Any) -> None:
        self._left = count
        self._done = done

    def one_more(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self._done()
