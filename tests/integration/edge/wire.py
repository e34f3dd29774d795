"""HTTP by hand: what a client sends and what exactly comes back."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from tests.integration.edge import letters_model
from tests.integration.edge.running_edge import EdgeProcess, ThreadedEdge

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_opened: weakref.WeakSet[asyncio.StreamWriter] = weakref.WeakSet()


def body(content: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": letters_model.NAME, "messages": [{"role": "user", "content": content}], **fields}


async def send(
    edge: ThreadedEdge | EdgeProcess,
    path: str,
    document: dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
    *,
    method: str = "POST",
) -> Connection:
    """A connection on which the request has been sent; nothing is read yet."""
    address = urlsplit(edge.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=1 << 16)
    _opened.add(writer)
    content = b"" if document is None else json.dumps(document).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: edge", "Connection: close", f"Content-Length: {len(content)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + content)
    await writer.drain()
    return reader, writer


def hang_up() -> None:
    """Ends what a failed test has left open: it would be reported in whatever test runs when it is collected."""
    for writer in tuple(_opened):
        writer.close()
    _opened.clear()


async def post(
    edge: ThreadedEdge | EdgeProcess, path: str, document: dict[str, Any], headers: dict[str, str] | None = None
) -> bytes:
    """The whole answer as it came, to the end of the connection."""
    return await rest(await send(edge, path, document, headers))


async def get(edge: ThreadedEdge | EdgeProcess, path: str, headers: dict[str, str] | None = None) -> bytes:
    return await rest(await send(edge, path, None, headers, method="GET"))


async def rest(connection: Connection) -> bytes:
    """Everything up to the end of the connection."""
    reader, writer = connection
    try:
        async with asyncio.timeout(120):
            return await reader.read(-1)
    finally:
        writer.close()


async def read_to(connection: Connection, mark: bytes) -> bytes:
    """What comes up to and with ``mark``."""
    async with asyncio.timeout(120):
        return await connection[0].readuntil(mark)


def is_complete(raw_body: bytes) -> bool:
    """Whether a chunked body has its final chunk; without it the connection was cut."""
    return raw_body.endswith(b"0\r\n\r\n")


def chunks_of(raw_body: bytes) -> bytes:
    """The content of a chunked body, complete or cut off between chunks."""
    content = b""
    while raw_body:
        size, _, raw_body = raw_body.partition(b"\r\n")
        length = int(size, 16)
        content += raw_body[:length]
        raw_body = raw_body[length + 2 :]
    return content


def split(raw: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and raw body of an answer."""
    head, _, raw_body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(status.split()[1]), headers, raw_body


def events_of(text: bytes) -> list[tuple[str, Any]]:
    """(id, document) of each block of an event stream; keep-alives are left out."""
    events = []
    for block in text.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n") if line and not line.startswith(":"))
        if "data" in fields:
            done = fields["data"] == "[DONE]"
            events.append((fields.get("id", ""), None if done else json.loads(fields["data"])))
    return events


def text_of(documents: list[tuple[str, Any]]) -> str:
    """The chat text in all chunks together."""
    deltas = [d["choices"][0]["delta"] for _, d in documents if d is not None and d.get("choices")]
    return "".join(delta.get("content") or "" for delta in deltas)


async def until(condition: Callable[[], Any], within_s: float = 60.0) -> None:
    """Waits for something that the edge or the worker will bring about."""
    for _ in range(int(within_s / 0.02)):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it never came true")
