"""A client that wants its whole answer: it keeps every byte, and goes on at another edge when a connection ends."""

from __future__ import annotations

import asyncio
import bisect
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from tests.faults.answers import Answer, Block, answer_of_document, answer_of_stream, blocks_of
from tests.faults.deployment import Process
from tests.faults.features import Feature

PATIENCE_S = 300.0
_PAUSE_S = 0.1
_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=2, sock_read=20)
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)


@dataclass
class Connection:
    """What came over one connection, and when: (length so far, monotonic seconds) after each read."""

    edge: str
    raw: bytearray = field(default_factory=bytearray)
    arrivals: list[tuple[int, float]] = field(default_factory=list)

    def blocks(self) -> list[Block]:
        return blocks_of(bytes(self.raw))

    def arrived(self, block: Block) -> float:
        """When the last byte of a block was there."""
        return self.arrivals[bisect.bisect_left(self.arrivals, block.end, key=lambda arrival: arrival[0])][1]


@dataclass
class Transcript:
    """Everything that one client saw of one request."""

    feature: Feature
    request_id: str = ""
    connections: list[Connection] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    document: dict[str, Any] | None = None
    gave_up: str = ""
    left: bool = False  # the client went away on purpose and did not come back
    began: float = field(default_factory=time.monotonic)
    _read: tuple[int, list[tuple[Block, float]]] = (-1, [])  # the length that was parsed, and what it held

    def logged_blocks(self) -> list[tuple[Block, float]]:
        """Blocks that stand for events of the log, with their times, over all connections."""
        length = sum(len(connection.raw) for connection in self.connections)
        if self._read[0] != length:
            found = [(b, c.arrived(b)) for c in self.connections for b in c.blocks() if b.position is not None]
            self._read = (length, found)
        return self._read[1]

    @property
    def position(self) -> str:
        """What to send as Last-Event-ID; empty before the first."""
        blocks = self.logged_blocks()
        return blocks[-1][0].id if blocks else ""

    @property
    def is_complete(self) -> bool:
        return self.document is not None or any(block.is_done for block, _ in self.logged_blocks())

    def answer(self) -> Answer:
        if self.document is not None:
            return answer_of_document(self.document)
        return answer_of_stream(block for block, _ in self.logged_blocks())


class Client:
    """Asks on behalf of many; ``edges`` says which can be reached now."""

    def __init__(self, session: aiohttp.ClientSession, edges: Callable[[], list[Process]], rng: Random) -> None:
        self._session = session
        self._edges = edges
        self._rng = rng

    async def stream(
        self, feature: Feature, key: str, *, hang_up_after: int = 0, transcript: Transcript | None = None, **more: Any
    ) -> Transcript:
        """Read a resumable stream to its end, over as many connections as it takes.

        ``hang_up_after``: the client drops its connection itself after about so many bytes, each time.
        ``transcript`` may be given to be looked at meanwhile.
        """
        transcript = transcript or Transcript(feature)
        body = feature.body(stream=True, **more)
        headers = {"Idempotency-Key": key, "X-Headrace-Resumable": "1"}
        give_up_at = time.monotonic() + PATIENCE_S
        while not transcript.is_complete and not transcript.gave_up:
            position = transcript.position
            resume = {"Last-Event-ID": position} if position else {}
            edge = self._pick()
            if transcript.request_id and self._rng.random() < 0.7:
                call = self._session.get(
                    f"{edge.url}/v1/streams/{transcript.request_id}", headers={**headers, **resume}, timeout=_TIMEOUT
                )
            else:
                call = self._session.post(
                    edge.url + feature.path, json=body, headers={**headers, **resume}, timeout=_TIMEOUT
                )
            await self._read(call, edge, transcript, hang_up_after)
            if time.monotonic() > give_up_at:
                transcript.gave_up = "out of patience"
        return transcript

    async def document(self, feature: Feature, key: str, **more: Any) -> Transcript:
        """Ask for the whole answer at once, again and again until there is one."""
        transcript = Transcript(feature)
        body = feature.body(stream=False, **more)
        give_up_at = time.monotonic() + PATIENCE_S
        while transcript.document is None and not transcript.gave_up:
            url = self._pick().url + feature.path
            try:
                async with self._session.post(
                    url, json=body, headers={"Idempotency-Key": key}, timeout=_TIMEOUT
                ) as response:
                    raw = await response.read()
                    transcript.request_id = response.headers.get("X-Request-Id", "")
                    if response.status == 200:
                        transcript.document = json.loads(raw)
                    else:
                        self._refused(transcript, response.status, raw)
            except _BROKEN as error:
                transcript.refusals.append(type(error).__name__)
            if transcript.document is None:
                await asyncio.sleep(_PAUSE_S)
            if time.monotonic() > give_up_at:
                transcript.gave_up = "out of patience"
        return transcript

    async def leave(self, feature: Feature, after_bytes: int) -> Transcript:
        """Ask for an ordinary stream and go away in the middle, for good."""
        transcript = Transcript(feature, left=True)
        edge = self._pick()
        call = self._session.post(edge.url + feature.path, json=feature.body(stream=True), timeout=_TIMEOUT)
        await self._read(call, edge, transcript, after_bytes)
        return transcript

    async def _read(self, call: Any, edge: Process, transcript: Transcript, hang_up_after: int) -> None:
        try:
            async with call as response:
                # An answer about a stream has an id of its own; the stream's stands beside it.
                if not transcript.request_id:
                    transcript.request_id = response.headers.get("X-Headrace-Request-Id", "")
                if response.status != 200:
                    self._refused(transcript, response.status, await response.read())
                    await asyncio.sleep(_PAUSE_S)
                    return
                connection = Connection(edge.name)
                transcript.connections.append(connection)
                async for piece in response.content.iter_any():
                    connection.raw += piece
                    connection.arrivals.append((len(connection.raw), time.monotonic()))
                    if hang_up_after and len(connection.raw) > hang_up_after:
                        response.close()
                        return
        except _BROKEN as error:
            transcript.refusals.append(type(error).__name__)
            await asyncio.sleep(_PAUSE_S)

    def _pick(self) -> Process:
        edges = self._edges()
        return self._rng.choice(edges)

    def _refused(self, transcript: Transcript, status: int, raw: bytes) -> None:
        code = json.loads(raw)["error"]["code"] if raw.startswith(b"{") else raw[:60].decode(errors="replace")
        transcript.refusals.append(f"{status} {code}")
        if status not in (429, 503):
            transcript.gave_up = f"{status} {code}"
