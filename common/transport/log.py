"""Reading a request's output stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from common.errors import StreamGap
from common.events import Recorded, decode_output
from common.transport.client import LogClient

PAGE = 1000


def recorded(entries: Iterable[Any], after: int) -> list[Recorded]:
    """Events from stream entries ``(id, fields)``, as the server gives them.

    Raises `StreamGap` when they do not follow ``after`` without a gap, `UnknownEvent`.
    """
    events: list[Recorded] = []
    for entry_id, fields in entries:
        n, expected = int(entry_id.partition(b"-")[0]), after + len(events) + 1
        if n != expected:
            raise StreamGap(expected=expected, got=n)
        payload = fields[b"d"] if isinstance(fields, dict) else fields[1]
        events.append(Recorded(n, decode_output(payload)))
    return events


async def read_page(client: LogClient, request_id: str, after: int, limit: int) -> list[Recorded]:
    """Events after+1 ..., at most ``limit``."""
    key = client.keys.output(request_id)
    entries = await client.command("XRANGE", key, f"{after + 1}-0", "+", "COUNT", limit, key=key)
    return recorded(entries, after)


async def read_all(client: LogClient, request_id: str) -> list[Recorded]:
    """The whole log as it is now, read in pages."""
    events: list[Recorded] = []
    while True:
        page = await read_page(client, request_id, len(events), PAGE)
        events += page
        if len(page) < PAGE:
            return events
