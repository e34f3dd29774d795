"""What the parsers of all tool-call formats share: pending text, the call being read, and content beside calls."""

from __future__ import annotations

from abc import ABC, abstractmethod

from edge.parsers.call_object import CallObject
from edge.parsers.parts import CallStarted, Content, Part, held_prefix


class CallTextParser(ABC):
    """A loop of steps over pending text; each format says what its steps are."""

    def __init__(self, *, is_forced: bool = False) -> None:
        """``is_forced``: a grammar allows calls only, so that nothing held back is content."""
        self._is_forced = is_forced
        self._pending = ""
        self._object: CallObject | None = None
        self._calls = 0
        self._space = ""  # white space that is content only if no call follows
        self._is_after_call = False
        self.was_cut = False  # the text ended inside a call that had begun

    def feed(self, text: str) -> list[Part]:
        """Parts that are certain after ``text``."""
        self._pending += text
        parts: list[Part] = []
        while self._pending and (self._read_object(parts) if self._object is not None else self._step(parts)):
            pass
        return parts

    def finish(self) -> list[Part]:
        """What was held back. A call that was cut stays as it is, and the beginning of one is dropped."""
        parts: list[Part] = []
        held = self._pending if self._object is None else self._object.raw
        self.was_cut = self._object is not None and self._object.is_started
        if self._is_forced or not self._holds_content():
            self._space = ""
        elif not self.was_cut:
            self._add_content(held, parts)
        self._pending, self._object = "", None
        if self._space and not self._is_after_call:
            parts.append(Content(self._space))
            self._space = ""
        return parts

    @abstractmethod
    def _step(self, parts: list[Part]) -> bool:
        """Take something from the pending text outside a call object; False when more text is needed."""

    @abstractmethod
    def _object_ended(self, *, is_broken: bool) -> None:
        """The call object has ended; choose the next step."""

    @abstractmethod
    def _holds_content(self) -> bool:
        """Whether what is held back may be ordinary text, if nothing follows it and no grammar forbids that."""

    def _begin_object(self, call_object: CallObject) -> None:
        self._object = call_object

    def _read_object(self, parts: list[Part]) -> bool:
        assert self._object is not None
        taken, made = self._object.feed(self._pending)
        self._pending = self._pending[taken:]
        if made and isinstance(made[0], CallStarted):
            self._calls += 1
            self._space, self._is_after_call = "", True
        parts += made
        if not (self._object.is_complete or self._object.is_broken):
            return False
        if not self._object.is_started:
            self._add_content(self._object.raw, parts)
        ended, self._object = self._object, None
        self._object_ended(is_broken=ended.is_broken)
        return True

    def _take_before(self, markers: tuple[str, ...], parts: list[Part]) -> str:
        """Makes content of the text before the first of ``markers``, which is returned; "" when none is complete."""
        text = self._pending
        found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
        if found:
            at, marker = min(found)
            self._add_content(text[:at], parts)
            self._pending = text[at + len(marker) :]
            return marker
        shown = len(text) - max([held_prefix(text, marker) for marker in markers])
        self._add_content(text[:shown], parts)
        self._pending = text[shown:]
        return ""

    def _add_content(self, text: str, parts: list[Part]) -> None:
        text = self._space + text
        if self._is_after_call:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._is_after_call = False
            parts.append(Content(shown))
