"""One JSON object that describes a tool call, read as it comes: ``{"name": ..., "arguments": {...}}``.

Arguments are passed on as the model spells them, as soon as the name is known. Keys may come in any order, and
``parameters`` is another word for ``arguments``. Arguments that are a JSON *string* are decoded first (some models
encode twice); missing and null ones are ``{}``.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

import msgspec

from edge.parsers.parts import CallArguments, CallStarted, Part

_ARGUMENTS: Final = frozenset({"arguments", "parameters"})
_WHITESPACE: Final = frozenset(" \t\r\n")


class _Expects(Enum):
    OPEN = auto()
    KEY = auto()  # or the end of an empty object
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_STRING = auto()
    IN_CONTAINER = auto()
    IN_SCALAR = auto()
    COMMA = auto()  # or the end of the object
    NOTHING = auto()


class CallObject:
    """Feed text until ``is_complete`` or ``is_broken``. ``raw`` is all that was taken."""

    def __init__(self, call: int, *, needs_arguments: bool = False) -> None:
        """``needs_arguments``: an object without the key is no call (formats without markup around calls)."""
        self.is_complete = False
        self.is_broken = False
        self.is_started = False
        self.raw = ""
        self._call = call
        self._needs_arguments = needs_arguments
        self._expects = _Expects.OPEN
        self._key = ""
        self._value: list[str] = []  # the current key or value, as spelled
        self._depth = 0  # open brackets inside a container
        self._is_quoted = False  # inside a string inside a container
        self._is_escaped = False
        self._name = ""
        self._has_arguments = False
        self._pending: list[str] = []  # arguments not given out yet
        self._is_bare = False  # the arguments alone, without an object around them

    @classmethod
    def of_name(cls, call: int, name: str) -> CallObject:
        """For formats with the name outside: the object read is the arguments themselves."""
        result = cls(call)
        result._name, result._key, result._expects, result._is_bare = name, "arguments", _Expects.VALUE, True
        return result

    def feed(self, text: str) -> tuple[int, list[Part]]:
        """How many characters belong to the object, and the parts that became certain."""
        taken = 0
        while taken < len(text) and not (self.is_complete or self.is_broken):
            self._take(text[taken])
            taken += 1
        self.raw += text[:taken]
        return taken, [] if self.is_broken else self._certain()

    def _certain(self) -> list[Part]:
        parts: list[Part] = []
        is_call = bool(self._name) and (self._has_arguments or not self._needs_arguments)
        if is_call and not self.is_started:
            self.is_started = True
            parts.append(CallStarted(self._call, self._name))
        if self.is_started and self.is_complete and not self._has_arguments:
            self._has_arguments = True
            self._pending.append("{}")
        if self.is_started and self._pending:
            parts.append(CallArguments(self._call, "".join(self._pending)))
            self._pending.clear()
        return parts

    def _take(self, character: str) -> None:
        match self._expects:
            case _Expects.IN_KEY | _Expects.IN_STRING:
                self._take_in_string(character)
            case _Expects.IN_CONTAINER:
                self._take_in_container(character)
            case _Expects.IN_SCALAR if character not in ",}" and character not in _WHITESPACE:
                self._value.append(character)
            case _Expects.IN_SCALAR:
                self._end_value()
                if not self.is_broken:
                    self._take_between(character)
            case _:
                self._take_between(character)

    def _take_between(self, character: str) -> None:
        """Between strings, containers and scalars."""
        if character in _WHITESPACE:
            return
        match self._expects, character:
            case _Expects.OPEN, "{":
                self._expects = _Expects.KEY
            case _Expects.KEY, '"':
                self._value = [character]
                self._expects = _Expects.IN_KEY
            case (_Expects.KEY, "}") if not self._key:
                self.is_complete = True
            case _Expects.COLON, ":":
                self._expects = _Expects.VALUE
            case _Expects.VALUE, _:
                self._begin_value(character)
            case _Expects.COMMA, ",":
                self._expects = _Expects.KEY
            case _Expects.COMMA, "}":
                self.is_complete = True
                self._expects = _Expects.NOTHING
            case _:
                self.is_broken = True

    def _begin_value(self, character: str) -> None:
        self._value = [character]
        if character == '"':
            self._expects = _Expects.IN_STRING
        elif character in "{[":
            self._expects = _Expects.IN_CONTAINER
            self._depth = 1
            self._pass_on(character)
        elif character in ",}:":
            self.is_broken = True
        else:
            self._expects = _Expects.IN_SCALAR

    def _take_in_string(self, character: str) -> None:
        self._value.append(character)
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"' and self._expects is _Expects.IN_KEY:
            self._key = _text_of("".join(self._value))
            self.is_broken = not self._key
            self._expects = _Expects.COLON
        elif character == '"':
            self._end_value()

    def _take_in_container(self, character: str) -> None:
        self._pass_on(character)
        if self._is_escaped:
            self._is_escaped = False
        elif self._is_quoted:
            self._is_escaped = character == "\\"
            self._is_quoted = character != '"'
        elif character == '"':
            self._is_quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if not self._depth:
                self._end_value(is_container=True)

    def _pass_on(self, character: str) -> None:
        if self._key in _ARGUMENTS:
            self._has_arguments = True
            self._pending.append(character)

    def _end_value(self, *, is_container: bool = False) -> None:
        self._expects = _Expects.COMMA
        self.is_complete = self._is_bare
        spelled = "".join(self._value)
        if self._key == "name":
            self._name = "" if is_container else _text_of(spelled)
            self.is_broken = not self._name
        elif self._key in _ARGUMENTS and not is_container:
            self._has_arguments = True
            self._pending.append("{}" if spelled == "null" else _text_of(spelled) or spelled)


def _text_of(spelled: str) -> str:
    """The text of a JSON string; empty when it is none."""
    try:
        return msgspec.json.decode(spelled, type=str)
    except msgspec.DecodeError:
        return ""
