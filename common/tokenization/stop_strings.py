"""Finding stop strings in a text that arrives in pieces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """``text`` is what may still be shown, ``stop`` the string that ended it (None: none has, yet)."""

    text: str
    stop: str | None = None


class StopStringMatcher:
    """Watches the text of one choice for its stop strings; what could become one is held back.

    The match that is complete first wins, and of several complete at the same character the longest: the outcome
    does not depend on how the text is cut into pieces. Knuth-Morris-Pratt automata, one a stop string, so the cost is
    linear in the text however the stop strings look.
    """

    __slots__ = ("_failures", "_first", "_held", "_include", "_states", "_stops")

    def __init__(self, stops: tuple[str, ...], *, include_stop: bool = False) -> None:
        """``include_stop``: the stop string itself is shown. Empty stop strings are ignored."""
        self._stops = tuple(sorted({stop for stop in stops if stop}, key=len, reverse=True))
        self._failures = tuple(_failure_function(stop) for stop in self._stops)
        self._first = frozenset(stop[0] for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._held = ""
        self._include = include_stop

    @property
    def held(self) -> str:
        """Text not shown yet because it may be the beginning of a stop string."""
        return self._held

    def feed(self, text: str) -> StopMatch:
        """What can be shown after ``text``. Once a stop string has matched, nothing more may be fed."""
        if not self._held and self._first.isdisjoint(text):
            return StopMatch(text)
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            stop = self._advance(character)
            if stop is not None:
                self._held = ""
                return StopMatch(pending[: end if self._include else end - len(stop)], stop)
        shown = len(pending) - max(self._states, default=0)
        self._held = pending[shown:]
        return StopMatch(pending[:shown])

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        """Moves every automaton on; the longest stop string that this character completes."""
        matched: str | None = None
        for i, (stop, failure) in enumerate(zip(self._stops, self._failures, strict=True)):
            state = self._states[i]
            while state and stop[state] != character:
                state = failure[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                if matched is None:
                    matched = stop
                state = failure[state - 1]
            self._states[i] = state
        return matched


def _failure_function(pattern: str) -> list[int]:
    """For each prefix of ``pattern``: the length of its longest proper prefix that is also its suffix."""
    failure = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = failure[length - 1]
        if pattern[i] == pattern[length]:
            length += 1
        failure[i] = length
    return failure
