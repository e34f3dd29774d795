"""The shared connection under cancellations, delays, time-outs and cuts at once: an answer that reached the wrong
caller would give one client another's words."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import pytest
import redis
from redis import asyncio as aredis

from common.transport.line import Line
from tests.servers import Server


class Wire:
    """Between a line and its server: answers come late, in pieces and in lumps, or not at all."""

    def __init__(self, server: Server) -> None:
        self._target = urlsplit(server.url)
        self._draw = random.Random(3)
        self.latest_s = 0.0
        self.may_speak = asyncio.Event()
        self.may_speak.set()
        self.accepted = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        return f"redis://{host}:{port}"

    async def close(self) -> None:
        self._server.close()
        self.may_speak.set()
        self.cut()
        await self._is_empty.wait()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        there, back = await asyncio.open_connection(self._target.hostname, self._target.port)
        self._writers |= {writer, back}
        self._is_empty.clear()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, back, late=False))
                group.create_task(self._forward(there, writer, late=True))
        except* OSError:
            pass
        finally:
            for end in (writer, back):
                end.transport.abort()
                self._writers.discard(end)
            if not self._writers:
                self._is_empty.set()

    async def _forward(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, late: bool) -> None:
        while data := await source.read(1 << 16):
            if late:
                await self.may_speak.wait()
            while data:
                size = self._draw.choice([1, 7, 100, len(data)])
                sink.write(data[:size])
                data = data[size:]
                if late and self._draw.random() < 0.1:
                    await asyncio.sleep(self._draw.random() * self.latest_s)
        raise ConnectionError("over")


@pytest.fixture
async def wire(valkey: Server) -> AsyncIterator[Wire]:
    made = Wire(valkey)
    yield made
    await made.close()


@pytest.fixture
async def pool(wire: Wire) -> AsyncIterator[aredis.ConnectionPool]:
    made = aredis.ConnectionPool.from_url(await wire.open(), protocol=2, socket_timeout=1.0)
    yield made
    await made.aclose()


async def test_no_answer_ever_reaches_another_caller(wire: Wire, pool: aredis.ConnectionPool) -> None:
    line, draw = Line(pool, timeout_s=0.25), random.Random(7)
    wire.latest_s = 0.02
    outcomes: dict[str, int] = {"answered": 0, "failed": 0, "given up": 0}

    async def ask(word: bytes) -> None:
        asked = asyncio.ensure_future(line.execute("ECHO", word))
        if draw.random() < 0.3:
            await asyncio.sleep(draw.random() * 0.02)
            asked.cancel()
        try:
            assert await asked == word
            outcomes["answered"] += 1
        except (redis.ConnectionError, redis.TimeoutError):
            outcomes["failed"] += 1
        except asyncio.CancelledError:
            outcomes["given up"] += 1

    async def disturb() -> None:
        while True:
            await asyncio.sleep(0.05)
            match draw.randrange(4):
                case 0:
                    wire.cut()
                case 1:
                    line.retire()
                case 2:
                    wire.may_speak.clear()
                    await asyncio.sleep(0.4)
                    wire.may_speak.set()
                case _:
                    pass

    disturbing = asyncio.create_task(disturb())
    i = 0
    while i < 60 or not all(outcomes.values()):
        i += 1
        await asyncio.gather(*(ask(b"%d-%d " % (i, k) * draw.choice([1, 1, 300])) for k in range(20)))
    disturbing.cancel()
    wire.may_speak.set()
    await line.close()


async def test_who_gives_up_while_it_connects_leaves_nothing_open(wire: Wire, pool: aredis.ConnectionPool) -> None:
    line = Line(pool, timeout_s=1.0)
    for turn in range(12):
        asked = asyncio.create_task(line.execute("PING"))
        for _ in range(turn):
            await asyncio.sleep(0)
        if asked.cancel():
            with pytest.raises(asyncio.CancelledError):
                await asked
        line.retire()
    gc.collect()  # a connection that was forgotten warns
    assert await line.execute("ECHO", "here") == b"here"
    await line.close()


async def test_a_server_that_accepts_and_says_nothing_is_waited_for_by_all_at_once(
    wire: Wire, pool: aredis.ConnectionPool
) -> None:
    wire.may_speak.clear()
    line = Line(pool, timeout_s=0.3)
    answers = await asyncio.gather(*(line.execute("PING") for _ in range(20)), return_exceptions=True)
    assert all(isinstance(answer, redis.TimeoutError | redis.ConnectionError) for answer in answers)
    while not wire.accepted:  # noqa: ASYNC110 - the connection waits to be looked at
        await asyncio.sleep(0.01)
    assert wire.accepted == 1
    wire.may_speak.set()
    await line.close()
