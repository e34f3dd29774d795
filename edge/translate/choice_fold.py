"""One choice's text to the parts of its answer: reasoning first, tool calls in what remains."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from common.events import FinishReason
from edge.parsers.parts import CallArguments, CallStarted, Content, Part, Reasoning
from edge.parsers.reasoning import ThinkParser
from edge.parsers.tool_calls import MISTRAL, tool_call_parser
from edge.translate.presentation import Presentation

FINISH_REASONS: Final = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "abort",
}


class ChoiceFold:
    """Feed the texts of a choice's events in order; the parts are the same for any division into events."""

    def __init__(self, presentation: Presentation) -> None:
        forced = presentation.tool_choice in ("required", "named")
        tool_format = presentation.tool_format
        self._think = ThinkParser(is_open=presentation.in_reasoning) if presentation.reasoning_format else None
        self._calls = tool_call_parser(tool_format, is_forced=forced) if tool_format else None
        self._presentation = presentation
        self._num_calls = 0
        self.num_tokens = 0
        self.num_reasoning_tokens = 0

    @property
    def is_verbatim(self) -> bool:
        """Every text is content as it comes."""
        return self._think is None and self._calls is None

    def tokens(self, token_ids: Sequence[int], text: str) -> list[Part]:
        """What one event adds."""
        self.num_tokens += len(token_ids)
        if self.is_verbatim:
            return [Content(text)] if text else []
        was_thinking = self._think is not None and self._think.is_thinking
        parts = self._fed(text)
        if was_thinking or (self._think is not None and self._think.is_thinking):
            self.num_reasoning_tokens += len(token_ids)
        return parts

    def finish(self, text: str) -> list[Part]:
        """What the last event adds, and what was held back."""
        parts = self._fed(text)
        if self._think is not None:
            parts += self._sorted(self._think.finish())
        if self._calls is not None:
            parts += self._shown(self._calls.finish())
        return parts

    def finish_reason(self, reason: FinishReason) -> str:
        """In the API's words. A call that was cut is no ``tool_calls``, and neither is the one that was named."""
        is_usable = self._num_calls > 0 and self._calls is not None and not self._calls.was_cut
        if reason is FinishReason.STOP and is_usable and self._presentation.tool_choice != "named":
            return "tool_calls"
        return FINISH_REASONS[reason]

    def _fed(self, text: str) -> list[Part]:
        if not text:
            return []
        if self._think is not None:
            return self._sorted(self._think.feed(text))
        return self._sorted([Content(text)])

    def _sorted(self, parts: Sequence[Part]) -> list[Part]:
        """Content through the parser of calls; reasoning as it is, if it is to be shown."""
        result: list[Part] = []
        for part in parts:
            if isinstance(part, Content) and self._calls is not None:
                result += self._shown(self._calls.feed(part.text))
            elif not isinstance(part, Reasoning) or self._presentation.include_reasoning:
                result.append(part)
        return result

    def _shown(self, parts: Sequence[Part]) -> list[Part]:
        """Without the calls beyond the first where only one is wanted."""
        limit = None if self._presentation.parallel_tool_calls else 1
        result: list[Part] = []
        for part in parts:
            if isinstance(part, CallStarted | CallArguments) and limit is not None and part.call >= limit:
                continue
            if isinstance(part, CallStarted):
                self._num_calls += 1
            result.append(part)
        return result


def call_id(presentation: Presentation, choice: int, call: int) -> str:
    """The same on every edge, unique in the conversation. Mistral's templates insist on nine letters and digits."""
    seed = f"{presentation.response_id}/{choice}/{call}".encode()
    digest = hashlib.blake2b(seed, digest_size=8).hexdigest()
    return digest[:9] if presentation.tool_format == MISTRAL else f"chatcmpl-tool-{digest}"
