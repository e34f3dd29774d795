"""What parsers make of text deltas: parts of an answer, in order. Joined parts are the same for any chunking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader; never empty, never markup."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's thinking; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A tool call begins. Calls are numbered 0, 1, ... in order."""

    call: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, JSON text as the model spells it; never empty."""

    call: int
    fragment: str


Part = Content | Reasoning | CallStarted | CallArguments


class Parser(Protocol):
    """A fold over the text deltas of one choice."""

    def feed(self, text: str) -> list[Part]:
        """Parts that are certain after ``text``."""

    def finish(self) -> list[Part]:
        """What was held back, at the end of the text."""


def held_prefix(text: str, marker: str) -> int:
    """Length of the longest end of ``text`` that may be the beginning of ``marker``, shorter than it."""
    tail = text[1 - len(marker) :]
    at = tail.find(marker[0])
    while at >= 0:
        if marker.startswith(tail[at:]):
            return len(tail) - at
        at = tail.find(marker[0], at + 1)
    return 0
