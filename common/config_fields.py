"""What a settings field looks like from outside: its flag, variable, key, default and kind."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

ENV_PREFIX: Final = "HEADRACE_"
Kind = Literal["bool", "list", "json", "value"]


@dataclass(frozen=True, slots=True)
class Flags:
    """Other names of a field, for ``Annotated``: further flags, further variables, or the bare first argument."""

    flags: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    positional: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of one group, as the sources and the reference see it."""

    section: str
    name: str
    kind: Kind
    is_secret: bool
    required: bool
    default: Any
    type_name: str
    bounds: str
    description: str
    names: Flags

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    @property
    def variable(self) -> str:
        return variable_of(self.name)

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag, *self.names.flags)

    @property
    def bare_word(self) -> str:
        """What stands for the bare argument: the name that people know it by."""
        return self.flags[-1].removeprefix("--").replace("-", "_").upper()

    @property
    def variables(self) -> tuple[str, ...]:
        """In order of precedence."""
        return (self.variable, *self.names.variables)

    def shown(self, value: Any) -> str:
        """``value`` for people: secrets and passwords masked."""
        return "***" if self.is_secret else redacted(repr(value))

    def shown_default(self) -> str:
        if self.required:
            return "required"
        if self.default in (None, (), {}, ""):
            return "none"
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        if isinstance(self.default, tuple | list):
            return ", ".join(str(item) for item in self.default)
        if self.is_secret:
            return "***" if str(self.default) else "none"
        return redacted(str(self.default))


def variable_of(name: str) -> str:
    return f"{ENV_PREFIX}{name.upper()}"


def settings_of(section: str, group: type[BaseModel]) -> list[Setting]:
    """The fields of one group, in the order of their definition."""
    return [_setting(section, name, info) for name, info in group.model_fields.items()]


def redacted(text: str) -> str:
    """``text`` without the passwords of the URLs in it."""
    text = re.sub(r"(://[^:/@\s']*):[^@\s']+@", r"\1:***@", text)
    return re.sub(r"([?&]password=)[^&\s']+", r"\1***", text)


def suggestion(name: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)``, or nothing."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f" (did you mean {close[0]}?)" if close else ""


def _setting(section: str, name: str, info: FieldInfo) -> Setting:
    plain = _without_none(info.annotation)
    names = next((item for item in info.metadata if isinstance(item, Flags)), Flags())
    return Setting(
        section=section,
        name=name,
        kind=_kind(plain),
        is_secret=SecretStr in _parts(plain),
        required=info.is_required(),
        default=None if info.is_required() else info.get_default(call_default_factory=True, validated_data={}),
        type_name=_type_name(plain),
        bounds=_bounds(info.metadata),
        description=" ".join((info.description or "").split()),
        names=names,
    )


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        return rest[0] if len(rest) == 1 else annotation
    return annotation


def _parts(annotation: Any) -> Collection[Any]:
    return {annotation, *get_args(annotation)}


def _kind(annotation: Any) -> Kind:
    if annotation is bool:
        return "bool"
    origin = get_origin(annotation) or annotation
    if origin in (tuple, list, frozenset, set):
        return "list"
    return "json" if origin is dict else "value"


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return "|".join(str(choice) for choice in get_args(annotation) if choice != "")
    if _kind(annotation) == "list":
        inner = [part for part in get_args(annotation) if part is not Ellipsis]
        return f"list of {_type_name(inner[0])}" if inner else "list"
    if _kind(annotation) == "json":
        return "JSON object"
    if origin in (Union, types.UnionType):
        return "|".join(_type_name(part) for part in get_args(annotation))
    if annotation is SecretStr:
        return "secret"
    if hasattr(annotation, "__members__"):
        return "|".join(str(member.value) for member in annotation)
    return getattr(annotation, "__name__", str(annotation))


def _bounds(metadata: Sequence[Any]) -> str:
    signs = {
        "ge": ">=",
        "gt": ">",
        "le": "<=",
        "lt": "<",
        "multiple_of": "a multiple of",
        "min_length": "length >=",
        "max_length": "length <=",
    }
    found = [
        f"{sign} {getattr(item, name)}" for item in metadata for name, sign in signs.items() if hasattr(item, name)
    ]
    return ", ".join(found)
