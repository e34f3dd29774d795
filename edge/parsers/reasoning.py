"""Thinking apart from the answer: ``<think>...</think>``, as Qwen3 and DeepSeek-R1 write it.

The opening tag may be in the prompt already; then the text begins inside. Thinking that is never closed is reasoning
to its end, and a text that does not begin with the tag is content altogether.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from edge.parsers.parts import Content, Part, Reasoning, held_prefix

THINK: Final = "think"
REASONING_FORMATS: Final = (THINK,)


class _Place(Enum):
    START = auto()
    THINKING = auto()
    AFTER = auto()  # white space between the closing tag and the answer
    CONTENT = auto()


class ThinkParser:
    """One choice's reasoning. ``is_open``: the prompt ends inside the thinking."""

    OPEN: Final = "<think>"
    CLOSE: Final = "</think>"

    def __init__(self, *, is_open: bool) -> None:
        self._place = _Place.THINKING if is_open else _Place.START
        self._pending = ""
        self._is_first = True  # nothing of the thinking was given out yet: white space before it is dropped

    @property
    def is_thinking(self) -> bool:
        """Whether the next token belongs to the reasoning, as far as can be told."""
        return self._place is _Place.THINKING

    def feed(self, text: str) -> list[Part]:
        """Parts that are certain after ``text``."""
        if self._place is _Place.CONTENT:
            return [Content(text)] if text else []
        self._pending += text
        parts: list[Part] = []
        while self._pending and self._step(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        """What was held back."""
        pending, self._pending = self._pending, ""
        if not pending or self._place is _Place.AFTER:
            return []
        return [Reasoning(pending)] if self._place is _Place.THINKING else [Content(pending)]

    def _step(self, parts: list[Part]) -> bool:
        match self._place:
            case _Place.START:
                return self._start()
            case _Place.THINKING:
                return self._think(parts)
            case _Place.AFTER:
                self._pending = self._pending.lstrip()
                if self._pending:
                    self._place = _Place.CONTENT
            case _Place.CONTENT:
                parts.append(Content(self._pending))
                self._pending = ""
        return True

    def _start(self) -> bool:
        text = self._pending.lstrip()
        if text.startswith(self.OPEN):
            self._pending, self._place = text[len(self.OPEN) :], _Place.THINKING
        elif not self.OPEN.startswith(text):
            self._place = _Place.CONTENT
        else:
            return False
        return True

    def _think(self, parts: list[Part]) -> bool:
        if self._is_first:
            self._pending = self._pending.lstrip()
            if self._pending.startswith(self.OPEN):  # some models repeat what the prompt opened
                self._pending = self._pending[len(self.OPEN) :]
                return True
            if self.OPEN.startswith(self._pending):
                return False
        before, found, after = self._pending.partition(self.CLOSE)
        if not found:
            after = before[len(before) - held_prefix(before, self.CLOSE) :]
            before = before[: len(before) - len(after)]
        shown = before.rstrip()  # white space before the closing tag is no reasoning
        if not found:
            after = before[len(shown) :] + after
        if shown:
            self._is_first = False
            parts.append(Reasoning(shown))
        self._pending = after
        if found:
            self._place = _Place.AFTER
        return bool(found)
