"""Recorded events to wire answers: pure folds, the same on every edge.

Both folds start at event 1; a reader that has seen events up to ``after`` gets only what comes later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from common.events import EngineRequest, Recorded
    from common.tokenization.tokenizer import Tokenizer

DONE: Final = b"[DONE]"


class StreamRenderer:
    """Chunks of one streamed answer, each the bytes of one JSON document (no ``data:`` framing), `DONE` last.

    One event may give several chunks: a resumable stream puts the event's number as ``id:`` on the last of them only,
    so that a reader cut off between them gets the event again.
    """

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer, *, after: int = 0) -> None:
        self.ended = False  # True once the terminal event was fed

    def feed(self, recorded: Recorded) -> list[bytes]:
        """Events in order from 1 on; returns [] for those up to ``after``. Raises `StreamGap` on a gap."""
        raise NotImplementedError


class AnswerBuilder:
    """The plain (not streamed) answer of one request."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer) -> None:
        self.ended = False  # True once the terminal event was fed

    def feed(self, recorded: Recorded) -> None:
        """Events in order from 1 on. Raises `StreamGap` on a gap."""
        raise NotImplementedError

    def body(self) -> bytes:
        """The JSON document. Raises the `HeadraceError` of a failed request (`EngineError`, ...)."""
        raise NotImplementedError
