"""The push channel of an edge: one subscription (one per node in a cluster) that heals itself and says so."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any, Final

from common.errors import LogCorrupt, LogUnavailable
from common.transport.client import LogClient
from common.transport.connections import TRANSIENT, PushSource, RedisError, heeding_cancellation
from common.transport.frames import channels, decode_frames
from common.transport.records import Frame, Resubscribed

_log = logging.getLogger(__name__)
_POLL_S: Final = 1.0
_PAUSE_S: Final = 0.05
_SILENCE_S: Final = 10.0  # then the connection is asked whether it still lives
_BACKLOG: Final = 10_000  # messages; a message is one step of one worker


class FrameBus:
    """The one push connection of an edge. A frame is a hint: it may be lost or repeated, never invented.

    ``async with FrameBus(client, edge_id) as bus: async for signal in bus: ...`` yields `Resubscribed` (first of all
    too, and after every reconnection) and tuples of frames, for ever; connection loss is handled inside. A consumer
    that falls far behind loses the backlog and gets `Resubscribed` instead.
    """

    def __init__(self, client: LogClient, edge_id: str) -> None:
        self._client = client
        self._channels = channels(client, edge_id)
        self._signals: asyncio.Queue[Resubscribed | tuple[Frame, ...]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FrameBus:
        self._task = asyncio.create_task(self._keep_subscribed(), name="frame-bus")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def __aiter__(self) -> AsyncIterator[Resubscribed | tuple[Frame, ...]]:
        while True:
            yield await self._signals.get()

    async def _keep_subscribed(self) -> None:
        while True:
            generation, cause = self._client.generation, Exception("the subscription ended")
            try:
                sources = self._client.connections.push_sources(self._channels)
                async with asyncio.TaskGroup() as group:
                    confirmed = _Countdown(len(self._channels), self._resubscribed)
                    for source in sources:
                        group.create_task(self._listen(source, confirmed))
            except* (*TRANSIENT, RedisError, _Lost) as errors:
                cause = errors.exceptions[0]
                _log.info("push subscription lost: %s", cause)
            with contextlib.suppress(LogUnavailable):
                # Shares the reconnection of everybody else, and learns new addresses.
                await self._client.reconnected(generation, cause)
            await asyncio.sleep(_PAUSE_S)

    async def _listen(self, source: PushSource, confirmed: _Countdown) -> None:
        async with contextlib.aclosing(source.client.pubsub()) as pubsub:
            if source.is_sharded:
                for name in source.channels:  # one at a time: names of one command must share a slot
                    await heeding_cancellation(pubsub.ssubscribe(name))
            else:
                await heeding_cancellation(pubsub.subscribe(*source.channels))
            silent_s = 0.0
            while True:
                message = await heeding_cancellation(pubsub.get_message(timeout=_POLL_S))
                silent_s = 0.0 if message is not None else silent_s + _POLL_S
                if message is not None:
                    self._take(message, confirmed)
                elif silent_s >= 2 * _SILENCE_S:
                    raise _Lost(f"no answer for {silent_s} s")
                elif silent_s >= _SILENCE_S:
                    await heeding_cancellation(pubsub.ping())

    def _take(self, message: dict[str, Any], confirmed: _Countdown) -> None:
        kind = message["type"]
        if kind in ("message", "smessage"):
            self._frames(message["data"])
        elif kind in ("subscribe", "ssubscribe"):
            confirmed.one_more()
        elif kind in ("unsubscribe", "sunsubscribe"):  # the slot has moved to another node
            raise _Lost("the server ended the subscription")

    def _frames(self, data: bytes) -> None:
        try:
            frames = decode_frames(data)
        except LogCorrupt as error:
            _log.error("%s", error)
            return
        if self._signals.qsize() >= _BACKLOG:
            self._resubscribed()
        self._signals.put_nowait(frames)

    def _resubscribed(self) -> None:
        while not self._signals.empty():  # whatever waits there is read from the log anyway
            self._signals.get_nowait()
        self._signals.put_nowait(Resubscribed())


class _Lost(Exception):
    """The subscription has to be made anew."""


class _Countdown:
    """Calls once when ``count`` things have happened, and for each one that comes later."""

    def __init__(self, count: int, done: Any) -> None:
        self._left = count
        self._done = done

    def one_more(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self._done()
