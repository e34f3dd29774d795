"""Recorded events to wire answers: pure folds, the same on every edge.

Both folds start at event 1; a reader that has seen events up to ``after`` gets only what comes later.

How a cancelled request looks: one that its deadline ended is an error (what there is of the answer is no answer), any
other has ``finish_reason`` "abort" in the choices that were not finished.
"""

from __future__ import annotations

from typing import Final, assert_never

from common.errors import StreamGap
from common.events import (
    CancelReason,
    ChoiceFinished,
    Ended,
    EngineRequest,
    Failed,
    FinishReason,
    Milestone,
    PromptScored,
    Recorded,
    Started,
    Tokens,
)
from common.tokenization.tokenizer import Tokenizer
from edge.errors import error_document
from edge.translate.answers import ChatAnswer, CompletionAnswer
from edge.translate.chat_stream import ChatStream
from edge.translate.completion_stream import CompletionStream
from edge.translate.failures import deadline_passed, failure_of
from edge.translate.presentation import CHAT, decode_presentation

DONE: Final = b"[DONE]"


class StreamRenderer:
    """Chunks of one streamed answer, each the bytes of one JSON document (no ``data:`` framing), `DONE` last.

    One event may give several chunks: a resumable stream puts the event's number as ``id:`` on the last of them only,
    so that a reader cut off between them gets the event again.
    """

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer, *, after: int = 0) -> None:
        presentation = decode_presentation(request.presentation)
        kind = ChatStream if presentation.endpoint == CHAT else CompletionStream
        self._stream = kind(request, presentation, tokenizer)
        self._request = request
        self._include_usage = presentation.include_usage
        self._after = after
        self._last_n = 0
        self._unfinished = set(range(request.num_choices))
        self._cancelled: dict[int, ChoiceFinished] = {}
        self.ended = False  # True once the terminal event was fed

    def feed(self, recorded: Recorded) -> list[bytes]:
        """Events in order from 1 on; returns [] for those up to ``after``. Raises `StreamGap` on a gap."""
        if recorded.n != self._last_n + 1:
            raise StreamGap(expected=self._last_n + 1, got=recorded.n)
        self._last_n = recorded.n
        chunks = self._rendered(recorded)
        return chunks if recorded.n > self._after else []

    def _rendered(self, recorded: Recorded) -> list[bytes]:
        match recorded.event:
            case Tokens() as event:
                return self._stream.tokens(event)
            case ChoiceFinished(finish_reason=FinishReason.CANCELLED) as event:
                self._cancelled[event.choice] = event  # shown when the reason is known
                return []
            case ChoiceFinished() as event:
                self._unfinished.discard(event.choice)
                return self._stream.finished(event)
            case PromptScored() as event:
                return self._stream.prompt_scored(event)
            case Ended() as event:
                self.ended = True
                return self._end(event)
            case Failed() as event:
                self.ended = True
                return [error_document(failure_of(event), self._request.request_id), DONE]
            case Started() | Milestone():
                return []
            case _ as never:
                assert_never(never)

    def _end(self, event: Ended) -> list[bytes]:
        if event.cancelled is CancelReason.DEADLINE:
            return [error_document(deadline_passed(), self._request.request_id), DONE]
        chunks = []
        for choice in sorted(self._unfinished):
            cancelled = self._cancelled.get(choice) or _cancelled(event, choice)
            chunks += self._stream.finished(cancelled)
        if self._include_usage:
            chunks.append(self._stream.usage(event.usage))
        return [*chunks, DONE]


class AnswerBuilder:
    """The plain (not streamed) answer of one request."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer) -> None:
        presentation = decode_presentation(request.presentation)
        kind = ChatAnswer if presentation.endpoint == CHAT else CompletionAnswer
        self._answer = kind(request, presentation, tokenizer)
        self._unfinished = set(range(request.num_choices))
        self._last_n = 0
        self._end: Ended | Failed | None = None

    @property
    def ended(self) -> bool:
        """True once the terminal event was fed."""
        return self._end is not None

    def feed(self, recorded: Recorded) -> None:
        """Events in order from 1 on. Raises `StreamGap` on a gap."""
        if recorded.n != self._last_n + 1:
            raise StreamGap(expected=self._last_n + 1, got=recorded.n)
        self._last_n = recorded.n
        match recorded.event:
            case Tokens() as event:
                self._answer.tokens(event)
            case ChoiceFinished() as event:
                self._unfinished.discard(event.choice)
                self._answer.finished(event)
            case PromptScored() as event:
                self._answer.prompt_scored(event)
            case (Ended() | Failed()) as event:
                self._end = event
            case Started() | Milestone():
                pass
            case _ as never:
                assert_never(never)

    def body(self) -> bytes:
        """The JSON document, once the request has ended.

        Raises the `HeadraceError` of a failed request (`EngineError`, ...), `DeadlineExceeded`.
        """
        assert self._end is not None, "the answer is complete only after the terminal event"
        if isinstance(self._end, Failed):
            raise failure_of(self._end)
        if self._end.cancelled is CancelReason.DEADLINE:
            raise deadline_passed()
        for choice in sorted(self._unfinished):
            self._answer.finished(_cancelled(self._end, choice))
        self._unfinished.clear()
        return self._answer.body(self._end.usage)


def _cancelled(event: Ended, choice: int) -> ChoiceFinished:
    """For a choice that the log does not end by itself."""
    return ChoiceFinished(epoch=event.epoch, t=event.t, choice=choice, finish_reason=FinishReason.CANCELLED)
