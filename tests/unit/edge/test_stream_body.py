"""What stands in a stream's body, by whichever way it goes to the connection."""

from __future__ import annotations

from typing import Any

import pytest

from common.events import Recorded
from edge.delivery import Delivery
from edge.http_protocol import DirectBody
from edge.stream_body import StreamBody
from edge.translate.responses import StreamRenderer
from tests.unit.edge.served_models import byte_tokenizer
from tests.unit.edge.translate.answered import STARTED, Log
from tests.unit.edge.translate.calls import chat


class Line:
    """A connection as `DirectBody` uses it: what was written, and whether the client takes it."""

    def __init__(self) -> None:
        self.written = b""
        self.flow = self
        self.transport = self
        self.write_paused = self.disconnected = self.response_complete = False
        self.closing = False
        self.chunked_encoding: bool | None = True

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.written += data


def answered() -> tuple[Any, list[Recorded]]:
    log = Log(chat(stream=True)).says("Hello").says(" world").says("!").finishes().ends()
    return log.request, log.recorded()


def body(request: Any, delivery: Delivery, line: Line | None = None) -> StreamBody:
    direct = None if line is None else DirectBody(line)  # type: ignore[arg-type]
    return StreamBody(StreamRenderer(request, byte_tokenizer(), after=delivery.after), delivery, direct)


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("at", range(1, 6))
def test_both_ways_together_give_what_one_gives(with_ids: bool, at: int) -> None:
    request, events = answered()
    delivery = Delivery(with_ids=with_ids)
    whole = body(request, delivery).block(events)
    line = Line()
    parted = body(request, delivery, line)
    parted.take(events[:at])
    rest = parted.block(events[at:])
    head, _, part = line.written.partition(b"\r\n")
    assert part.removesuffix(b"\r\n") + rest == whole
    assert int(head or b"0", 16) == len(part.removesuffix(b"\r\n"))
    assert parted.ended


def test_what_a_client_has_seen_is_not_shown_again() -> None:
    request, events = answered()
    whole = body(request, Delivery(with_ids=True)).block(events)
    blocks = whole.split(b"\n\n")[:-1]
    for seen in range(len(blocks)):
        delivery = Delivery(with_ids=True, skip_chunks=seen)
        assert body(request, delivery).block(events) == b"".join(block + b"\n\n" for block in blocks[seen:])


@pytest.mark.parametrize(
    ("state", "value"),
    [
        ("write_paused", True),
        ("disconnected", True),
        ("response_complete", True),
        ("chunked_encoding", None),
        ("closing", True),
    ],
)
def test_a_connection_that_cannot_take_more_is_not_ready(state: str, value: bool | None) -> None:
    request, _ = answered()
    line = Line()
    parted = body(request, Delivery(), line)
    assert parted.is_ready
    setattr(line, state, value)
    assert not parted.is_ready


def test_without_a_connection_of_ours_nothing_is_direct() -> None:
    request, _ = answered()
    assert not body(request, Delivery()).is_ready


def test_events_that_show_nothing_write_nothing() -> None:
    request, _ = answered()
    line = Line()
    body(request, Delivery(), line).take([Recorded(1, STARTED)])
    assert line.written == b""
