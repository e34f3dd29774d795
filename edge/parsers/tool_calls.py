"""Tool calls in generated text, one parser instance a choice. Markup never becomes content, whatever the chunking.

White space beside a call is no content. What looks like a call but is none (broken JSON, no name) is content, without
its markup. An unfinished call stays unfinished; the finish reason tells (`edge.translate.choice_fold`). One that was
cut before its name is dropped; where neither a grammar nor complete opening markup says that it is one, it is content.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from edge.parsers.call_object import CallObject
from edge.parsers.call_text import CallTextParser
from edge.parsers.parts import Part

HERMES: Final = "hermes"
LLAMA3_JSON: Final = "llama3_json"
MISTRAL: Final = "mistral"
TOOL_FORMATS: Final = (HERMES, LLAMA3_JSON, MISTRAL)


def tool_call_parser(tool_format: str, *, is_forced: bool = False) -> CallTextParser:
    """A new parser. ``is_forced``: a grammar allows nothing but calls. ``tool_format``: of `TOOL_FORMATS`."""
    if tool_format == LLAMA3_JSON:
        return Llama3JsonParser(is_forced=is_forced)
    if tool_format == MISTRAL:
        return MistralParser(is_forced=is_forced)
    return HermesParser(is_forced=is_forced)


class _Place(Enum):
    OUTSIDE = auto()
    INSIDE = auto()  # after the opening markup
    LIST = auto()  # inside a list of calls
    SKIPPING = auto()  # after a call that broke off, up to the closing markup


class HermesParser(CallTextParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number, with text between them."""

    OPEN: Final = "<tool_call>"
    CLOSE: Final = "</tool_call>"

    def __init__(self, *, is_forced: bool = False) -> None:
        super().__init__(is_forced=is_forced)
        self._place = _Place.OUTSIDE

    def _step(self, parts: list[Part]) -> bool:
        if self._place is _Place.INSIDE:
            return self._step_inside()
        if self._place is _Place.SKIPPING:
            return self._skip()
        marker = self._take_before((self.OPEN, self.CLOSE), parts)  # a closing tag alone is markup too
        if marker == self.OPEN:
            self._place = _Place.INSIDE
        return bool(marker)

    def _step_inside(self) -> bool:
        """The next object, or the closing tag; a closing tag that is missing is forgiven."""
        text = self._pending = self._pending.lstrip()
        if text.startswith("{"):
            self._begin_object(CallObject(self._calls))
        elif text.startswith(self.CLOSE):
            self._pending = text[len(self.CLOSE) :]
            self._place = _Place.OUTSIDE
        elif self.CLOSE.startswith(text):
            return False
        else:
            self._place = _Place.OUTSIDE
        return True

    def _skip(self) -> bool:
        _, found, after = self._pending.partition(self.CLOSE)
        self._pending = after if found else self._pending[-len(self.CLOSE) + 1 :]
        if found:
            self._place = _Place.OUTSIDE
        return bool(found)

    def _object_ended(self, *, is_broken: bool) -> None:
        if is_broken:
            self._place = _Place.SKIPPING if self._is_after_call else _Place.OUTSIDE

    def _holds_content(self) -> bool:
        return self._place is _Place.OUTSIDE


class Llama3JsonParser(CallTextParser):
    """The whole text is ``{"name": ..., "parameters": {...}}``; several calls are separated by ``;``.

    An optional ``<|python_tag|>`` stands before it. Text that begins with anything else is content to its end.
    """

    TAG: Final = "<|python_tag|>"

    def __init__(self, *, is_forced: bool = False) -> None:
        super().__init__(is_forced=is_forced)
        self._is_content = False
        self._is_marked = False  # a tag or a separator says that calls follow

    def _step(self, parts: list[Part]) -> bool:
        if self._is_content:
            self._add_content(self._pending, parts)
            self._pending = ""
            return False
        text = self._pending.lstrip()
        if not text or (self.TAG.startswith(text) and text != self.TAG):
            return False
        if text.startswith(self.TAG):
            self._pending, self._is_marked = text[len(self.TAG) :], True
        elif text[0] == ";" and self._calls:
            self._pending, self._is_marked = text[1:], True
        elif text[0] == "{":
            self._space += self._pending[: len(self._pending) - len(text)]
            self._pending = text
            self._begin_object(CallObject(self._calls, needs_arguments=True))
        else:
            self._is_content = True
        return True

    def _object_ended(self, *, is_broken: bool) -> None:
        self._is_content = is_broken or not self._is_after_call

    def _holds_content(self) -> bool:
        return self._is_content or not self._is_marked


class MistralParser(CallTextParser):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or ``[TOOL_CALLS]name[ARGS]{...}``, repeated."""

    MARKER: Final = "[TOOL_CALLS]"
    ARGUMENTS_MARKER: Final = "[ARGS]"

    def __init__(self, *, is_forced: bool = False) -> None:
        super().__init__(is_forced=is_forced)
        self._place = _Place.INSIDE if is_forced else _Place.OUTSIDE

    def _step(self, parts: list[Part]) -> bool:
        if self._place is _Place.INSIDE:
            return self._step_inside()
        if self._place is _Place.LIST:
            return self._step_list()
        marker = self._take_before((self.MARKER,), parts)
        if marker:
            self._place = _Place.INSIDE
        return bool(marker)

    def _step_inside(self) -> bool:
        """A list, an object, or a name before its arguments."""
        text = self._pending.lstrip()
        if not text or (self.MARKER.startswith(text) and text not in ("[", self.MARKER)):
            return False
        if text.startswith(self.MARKER):
            self._pending = text[len(self.MARKER) :]
        elif text[0] == "[":
            if len(text) == 1:
                return False
            self._pending, self._place = text[1:], _Place.LIST
        elif text[0] == "{":
            self._pending = text
            self._begin_object(CallObject(self._calls))
        else:
            return self._read_name(text)
        return True

    def _read_name(self, text: str) -> bool:
        name, found, arguments = text.partition("{")
        if not found:
            return False
        self._pending = "{" + arguments
        self._begin_object(CallObject.of_name(self._calls, name.replace(self.ARGUMENTS_MARKER, "").strip()))
        return True

    def _step_list(self) -> bool:
        text = self._pending = self._pending.lstrip(" \t\r\n,")
        if text.startswith("{"):
            self._begin_object(CallObject(self._calls))
        elif text:
            self._pending = text[1:] if text[0] == "]" else text
            self._place = _Place.OUTSIDE
        return bool(text)

    def _object_ended(self, *, is_broken: bool) -> None:
        if is_broken or self._place is _Place.INSIDE:
            self._place = _Place.OUTSIDE

    def _holds_content(self) -> bool:
        if self._place is _Place.INSIDE:  # one word may be the beginning of a name
            return len(self._pending.split()) > 1
        return self._place is _Place.OUTSIDE
