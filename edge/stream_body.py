"""What stands in the body of a stream, and the direct way of it to the connection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge.sse import frame_bare, frame_with_ids

if TYPE_CHECKING:
    from collections.abc import Iterable

    from common.events import Recorded
    from edge.delivery import Delivery
    from edge.http_protocol import DirectBody
    from edge.translate.responses import AnswerBuilder, StreamRenderer


class StreamBody:
    """Events to server-sent events as one client wants them. A `Direct` of its reader: what `take` is given goes to the
    connection at once. When the client is behind, it is not ready, and blocks go through the response, which waits."""

    def __init__(self, renderer: StreamRenderer, delivery: Delivery, direct: DirectBody | None) -> None:
        self._renderer = renderer
        self._with_ids = delivery.with_ids
        self._first_chunk = (delivery.after + 1, delivery.after_chunks)
        self._skip = delivery.skip_chunks
        self._seen_of_first = delivery.after_chunks  # less what it had
        self._direct = direct

    @property
    def ended(self) -> bool:
        """The last word is in a block."""
        return self._renderer.ended

    @property
    def num_missing(self) -> int:
        """Of the chunks that the client says to have seen, how many the stream did not have."""
        return self._skip + self._seen_of_first

    def block(self, events: Iterable[Recorded]) -> bytes:
        """One write for all of ``events``; empty when they show nothing."""
        feed = self._renderer.feed
        if self._with_ids:
            return b"".join([self._positioned(recorded.n, feed(recorded)) for recorded in events])
        return b"".join([frame_bare(feed(recorded)) for recorded in events])

    @property
    def is_ready(self) -> bool:
        return self._direct is not None and self._direct.is_ready

    def take(self, events: list[Recorded]) -> None:
        block = self.block(events)
        if block and self._direct is not None:
            self._direct.write(block)

    def _positioned(self, n: int, chunks: list[bytes]) -> bytes:
        """Without what the client has seen of them."""
        if not chunks:
            return b""
        first = min(self._skip, len(chunks))
        self._skip -= first
        if not first and n == self._first_chunk[0]:
            first = self._first_chunk[1]
            self._seen_of_first = max(0, first - len(chunks))
        return frame_with_ids(n, chunks, first=first)


class DocumentBody:
    """A `Direct` that only collects: nobody waits for a part of a document."""

    is_ready = True

    def __init__(self, builder: AnswerBuilder) -> None:
        self._builder = builder

    def take(self, events: list[Recorded]) -> None:
        for recorded in events:
            self._builder.feed(recorded)
