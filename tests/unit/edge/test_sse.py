"""The two forms of event stream, and positions in them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.boundary import ClientGone
from edge.config import StreamSettings
from edge.http_protocol import DirectBody
from edge.sse import EventStream, StreamCut, frame_bare, frame_with_ids, parse_position

SCOPE: dict[str, Any] = {"type": "http", "method": "POST"}


def test_a_bare_block_is_data_and_nothing_else() -> None:
    assert frame_bare([b"{}", b"[DONE]"]) == b"data: {}\n\ndata: [DONE]\n\n"


def test_the_last_chunk_of_an_event_has_its_number_and_the_others_say_how_far_they_are() -> None:
    assert frame_with_ids(7, [b"a", b"b", b"c"]) == b"id: 7.1\ndata: a\n\nid: 7.2\ndata: b\n\nid: 7\ndata: c\n\n"
    assert frame_with_ids(7, [b"a"]) == b"id: 7\ndata: a\n\n"


@given(st.integers(1, 10**6), st.integers(1, 6))
def test_from_every_position_on_comes_exactly_the_rest(n: int, num_chunks: int) -> None:
    chunks = [b"%d" % i for i in range(num_chunks)]
    blocks = frame_with_ids(n, chunks).split(b"\n\n")[:-1]
    for seen, block in enumerate(blocks, start=1):
        after, after_chunks = parse_position(block.split(b"\n")[0].removeprefix(b"id: ").decode())
        if seen == num_chunks:
            assert (after, after_chunks) == (n, 0)
        else:
            assert after == n - 1
            assert frame_with_ids(n, chunks, first=after_chunks).split(b"\n\n")[:-1] == blocks[seen:]


@pytest.mark.parametrize("text", ["", "x", "-1", "+1", "1.", ".1", "0.1", "1.-1", "1e3", "٣", "9" * 19])
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="position"):
        parse_position(text)


async def _nobody_leaves() -> Any:
    await asyncio.Event().wait()


class TestEventStream:
    @pytest.fixture
    def closed(self) -> list[str]:
        return []

    def stream(self, body: AsyncIterator[bytes], closed: list[str], **settings: Any) -> EventStream:
        return EventStream(
            body, StreamSettings(**settings), with_ids=False, headers={}, on_close=lambda: closed.append("closed")
        )

    async def test_it_closes_once_after_the_last_byte(self, closed: list[str]) -> None:
        async def body() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"

        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        await self.stream(body(), closed)(SCOPE, _nobody_leaves, send)
        assert [message.get("body") for message in sent[1:]] == [b"data: 1\n\n", b""]
        assert closed == ["closed"]

    async def test_a_reader_that_is_gone_before_the_first_byte_closes_it_too(self, closed: list[str]) -> None:
        async def body() -> AsyncIterator[bytes]:
            await asyncio.Event().wait()
            yield b""

        async def leave() -> Any:
            return {"type": "http.disconnect"}

        async def send(_: Any) -> None:
            return None

        await self.stream(body(), closed)(SCOPE, leave, send)
        assert closed == ["closed"]

    async def test_a_reader_that_takes_nothing_is_cut(self, closed: list[str]) -> None:
        async def body() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        with pytest.raises(StreamCut):
            await self.stream(body(), closed, send_timeout_s=0.05)(SCOPE, _nobody_leaves, send)
        assert closed == ["closed"]


class Connection:
    """What `DirectBody` sees of one that takes everything."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.flow = self.transport = self
        self.write_paused = self.disconnected = self.response_complete = False
        self.chunked_encoding = True

    def is_closing(self) -> bool:
        return False

    def resume_reading(self) -> None:
        self.is_reading = True

    def write(self, data: bytes) -> None:
        self.written.append(data)


class TestOnItsConnection:
    """A stream that the connection itself tells of its end, and whose pings a timer writes."""

    @pytest.fixture
    def connection(self) -> Connection:
        return Connection()

    async def test_it_is_written_to_its_end_and_closed_once(self, connection: Connection) -> None:
        closed: list[str] = []

        async def body() -> AsyncGenerator[bytes, None]:
            yield b"data: 1\n\n"
            yield b"data: 2\n\n"

        sent = await self.run(body(), connection, closed)
        assert [(m.get("body"), m.get("more_body")) for m in sent[1:]] == [
            (b"data: 1\n\n", True),
            (b"data: 2\n\n", True),
            (b"", False),
        ]
        assert closed == ["closed"]

    async def test_pings_are_written_while_nothing_else_is(self, connection: Connection) -> None:
        async def body() -> AsyncGenerator[bytes, None]:
            async with asyncio.timeout(30):
                for _ in range(3000):
                    if len(connection.written) >= 2:
                        break
                    await asyncio.sleep(0.01)
            yield b"data: 1\n\n"

        await self.run(body(), connection, [], ping_interval_s=0.01)
        assert set(connection.written) == {b"8\r\n: ping\n\n\r\n"}

    async def test_a_client_that_is_behind_gets_no_ping(self, connection: Connection) -> None:
        connection.write_paused = True

        async def body() -> AsyncGenerator[bytes, None]:
            await asyncio.sleep(0.05)
            yield b"data: 1\n\n"

        await self.run(body(), connection, [], ping_interval_s=0.01)
        assert connection.written == []

    async def test_a_body_that_hears_of_the_hang_up_ends_it(self, connection: Connection) -> None:
        gone = asyncio.Event()
        closed: list[str] = []

        async def body() -> AsyncGenerator[bytes, None]:
            await gone.wait()
            raise ClientGone
            yield b""

        direct = direct_of(connection)
        running = asyncio.ensure_future(self.run(body(), connection, closed, direct=direct, on_hang_up=gone.set))
        await asyncio.sleep(0)
        direct.hung_up()
        with pytest.raises(ClientGone):
            await running
        assert closed == ["closed"]

    async def test_of_one_that_was_gone_before_it_is_told_at_once(self, connection: Connection) -> None:
        connection.disconnected = True
        told: list[str] = []
        with direct_of(connection).watching(lambda: told.append("gone")):
            assert told == ["gone"]

    async def run(
        self,
        body: AsyncGenerator[bytes, None],
        connection: Connection,
        closed: list[str],
        *,
        direct: DirectBody | None = None,
        on_hang_up: Any = None,
        **settings: Any,
    ) -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        stream = EventStream(
            body,
            StreamSettings(**settings),
            with_ids=False,
            headers={},
            on_close=lambda: closed.append("closed"),
            on_hang_up=on_hang_up or (lambda: None),
            direct=direct or direct_of(connection),
        )
        await stream(SCOPE, _nobody_leaves, send)
        return sent


def direct_of(connection: Connection) -> DirectBody:
    return DirectBody(connection)  # type: ignore[arg-type]
