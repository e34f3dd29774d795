"""Bytes to typed bodies, strictly: what is not standard JSON, or not of the declared type, is refused by name."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Final, TypeVar, get_args, get_origin

import msgspec

from common.errors import InvalidRequest

MAX_ECHO_CHARS: Final = 200
MAX_NESTING: Final = 200
_UNKNOWN: Final = "unknown_fields"

_Body = TypeVar("_Body", bound=msgspec.Struct)

_STRINGS: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_WHERE: Final = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_PATH_STEP: Final = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]|\[\.\.\.\]")


def echo(value: object) -> str:
    """A value as JSON-like text for an error message, bounded in length."""
    if isinstance(value, str):
        shown = repr(value[: MAX_ECHO_CHARS + 1])
    elif isinstance(value, dict | list | tuple):
        shown = repr(_clipped(value, depth=3))
    else:
        shown = _scalar(value)
    return shown if len(shown) <= MAX_ECHO_CHARS else shown[:MAX_ECHO_CHARS] + "..."


def _scalar(value: object) -> str:
    """Huge integers are not spelled out: that alone takes quadratic time, and Python refuses it."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def _clipped(value: object, depth: int) -> object:
    """A small part of a large structure; enough to recognise it."""
    if isinstance(value, str):
        return value[:MAX_ECHO_CHARS]
    if isinstance(value, dict):
        pairs = list(value.items())[:8] if depth else []
        return {key[:MAX_ECHO_CHARS]: _clipped(item, depth - 1) for key, item in pairs}
    if isinstance(value, list | tuple):
        return [_clipped(item, depth - 1) for item in value[:8]] if depth else []
    return value if not isinstance(value, int) or value.bit_length() <= 128 else _scalar(value)


def decode_object(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object.

    Raises `InvalidRequest`: not JSON (NaN and Infinity are not), not UTF-8, nested too deeply, or no object.
    """
    _check_nesting(raw)
    if not raw.strip():
        raise InvalidRequest("the body is empty; send a JSON object")
    try:
        decoded = msgspec.json.decode(raw)
    except msgspec.MsgspecError as error:
        raise _not_json(str(error)) from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    if not isinstance(decoded, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {echo(decoded)}")
    return decoded


def decode_body(raw: bytes, kind: type[_Body]) -> _Body:
    """The body as ``kind``. Null is like absent; what ``kind`` does not declare goes to its ``unknown_fields``, if any,
    as does what an object inside it does not declare, by its path.

    Raises `InvalidRequest` with ``param`` naming the field of a wrong type.
    """
    fields = decode_object(raw)
    known = set(kind.__struct_fields__) - {_UNKNOWN}
    declared = {name: value for name, value in fields.items() if name in known and value is not None}
    unknown = {name: value for name, value in fields.items() if name not in known and value is not None}
    for name in _integer_fields(kind) & declared.keys():
        if isinstance(declared[name], float) and declared[name].is_integer():
            declared[name] = int(declared[name])  # JSON has one kind of number: 16.0 is an integer
    if _UNKNOWN in kind.__struct_fields__:
        declared[_UNKNOWN] = unknown | _unknown_inside(declared, kind)
    try:
        return msgspec.convert(declared, kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error), declared) from error


@cache
def _integer_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(found.name for found in msgspec.structs.fields(kind) if found.type in (int, int | None))


def _unknown_inside(declared: dict[str, Any], kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, known in _nested_fields(kind).items()
        if isinstance(declared.get(name), dict)
        for key, value in declared[name].items()
        if key not in known and value is not None
    }


@cache
def _nested_fields(kind: type[msgspec.Struct]) -> dict[str, tuple[str, ...]]:
    """The fields that hold one object of a declared form, and the names in it."""
    return {
        found.name: part.__struct_fields__
        for found in msgspec.structs.fields(kind)
        for part in get_args(found.type) or (found.type,)
        if isinstance(part, type) and issubclass(part, msgspec.Struct) and get_origin(found.type) is not list
    }


def _not_json(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not valid JSON: {reason}")


def _wrong_type(reason: str, fields: dict[str, Any]) -> InvalidRequest:
    found = _WHERE.match(reason)
    what, path = (found["what"], found["path"] or "") if found else (reason, "")
    what = what.replace("`", "").replace("Expected ", "expected ").replace("Object ", "object ")
    if path.startswith("[..."):
        path = ""
    value = _value_at(fields, path)
    missing = re.search(r"missing required field (\w+)", what)
    if missing is not None:
        name = f"{path}.{missing[1]}" if path else missing[1]
        return InvalidRequest(f"{name} is required", param=name)
    what = what.split(", got ")[0]
    given = f", got {echo(value)}" if path else ""
    return InvalidRequest(f"{path or 'the body'}: {what}{given}", param=path or None)


def _value_at(fields: dict[str, Any], path: str) -> object:
    value: Any = fields
    for name, index in _PATH_STEP.findall(path):
        if name and isinstance(value, dict):
            value = value.get(name)
        elif index and isinstance(value, list) and int(index) < len(value):
            value = value[int(index)]
    return value


def _check_nesting(raw: bytes) -> None:
    """Before anything recursive sees the body. Brackets inside strings do not count."""
    if raw.count(b"{") + raw.count(b"[") <= MAX_NESTING:
        return
    depth = 0
    for bracket in re.finditer(rb"[\[\]{}]", _STRINGS.sub(b"", raw)):
        depth += 1 if bracket[0] in b"[{" else -1
        if depth > MAX_NESTING:
            raise InvalidRequest(f"the body is nested more than {MAX_NESTING} levels deep")
