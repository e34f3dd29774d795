"""The three places a setting may come from. Each reader returns what it found and the mistakes of that place."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

from common.config_fields import ENV_PREFIX, Setting, suggestion

CONFIG_VARIABLE: Final = f"{ENV_PREFIX}CONFIG"


@dataclass(frozen=True, slots=True)
class Given:
    """A raw value and where it stands."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Found:
    """What one source gives: values by field name, and one line a mistake."""

    values: dict[str, Given]
    mistakes: list[str]


class _Usage(Exception):
    """argparse gave up on the command line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Usage(message)


def build_parser(
    settings: Sequence[Setting], titles: Mapping[str, str], *, prog: str, description: str
) -> argparse.ArgumentParser:
    """Every setting as a flag, in one help group a section."""
    bare = "".join(
        f"{setting.bare_word} " if setting.required else f"[{setting.bare_word}] "
        for setting in settings
        if setting.names.positional
    )
    parser = _Parser(
        prog=prog,
        usage=f"{prog} {bare}[options]",
        description=description.replace("``", ""),  # module docstrings are marked up for other readers
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"Each flag may also be set by its variable or in a TOML file; see --config ({CONFIG_VARIABLE}).",
    )
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with settings [{CONFIG_VARIABLE}]")
    groups = {section: parser.add_argument_group(title) for section, title in titles.items()}
    for setting in settings:
        _add(groups[setting.section], setting)
    return parser


def read_flags(parser: argparse.ArgumentParser, settings: Sequence[Setting], argv: Sequence[str]) -> Found:
    """Values stay text: types are checked together with those of the other sources."""
    try:
        parsed, extra = parser.parse_known_args(list(argv))
    except _Usage as usage:
        return Found({}, [f"command line: {usage}"])
    found = Found({}, _unexpected(extra, [flag for setting in settings for flag in setting.flags]))
    for setting in settings:
        value = getattr(parsed, setting.name, None)
        bare = getattr(parsed, _bare_name(setting), None)
        if value is not None and bare is not None:
            found.mistakes.append(f"{setting.name}: given twice, as argument {bare!r} and as {setting.flag} {value!r}")
        if value is not None or bare is not None:
            _take(found, setting, bare if value is None else value, setting.flag)
    if parsed.config is not None:
        found.values["config"] = Given(parsed.config, "--config")
    return found


def read_environment(settings: Sequence[Setting], environ: Mapping[str, str], elsewhere: Collection[str]) -> Found:
    """``elsewhere``: variables of Headrace's other processes, which may be set here too."""
    found = Found({}, [])
    for setting in settings:
        variable = next((name for name in setting.variables if environ.get(name)), None)
        if variable is not None:
            _take(found, setting, environ[variable], variable)
    own = {name for setting in settings for name in setting.variables}
    known = {*own, *elsewhere, CONFIG_VARIABLE}
    found.mistakes.extend(
        f"{name}: unknown variable{suggestion(name, known)}"
        for name in sorted(environ)
        if name.startswith(ENV_PREFIX) and name not in known
    )
    return found


def read_toml(path: Path, settings: Sequence[Setting], elsewhere: Mapping[str, Collection[str]]) -> Found:
    """``elsewhere``: sections and fields of Headrace's other processes, which may stand in the same file."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return Found({}, [f"{path}: cannot be read: {reason}"])
    return _from_document(document, str(path), settings, elsewhere)


def _from_document(
    document: Mapping[str, Any], path: str, settings: Sequence[Setting], elsewhere: Mapping[str, Collection[str]]
) -> Found:
    own = {setting.name: setting for setting in settings}
    sections = {setting.section for setting in settings} | set(elsewhere)
    other_fields = {name for fields in elsewhere.values() for name in fields}
    values: dict[str, Given] = {}
    mistakes: list[str] = []
    found = Found(values, mistakes)

    def take(key: str, value: Any, section: str | None) -> None:
        where = f"{path}: {f'[{section}] ' if section else ''}{key}"
        fits = key in own and section in (None, own[key].section)
        if fits and key in values:
            mistakes.append(f"{where}: given twice in the file")
        elif fits and own[key].kind == "list" and isinstance(value, str):
            _take(found, own[key], value, where)
        elif fits:
            values[key] = Given(value, where)
        elif key not in (elsewhere.get(section, ()) if section else other_fields):
            mistakes.append(f"{where}: unknown key{suggestion(key, [*own, *other_fields])}")

    for key, value in document.items():
        if key in sections and isinstance(value, dict) and key not in own:
            for inner, inner_value in value.items():
                take(inner, inner_value, key)
        else:
            take(key, value, None)
    return found


def _take(found: Found, setting: Setting, raw: Any, source: str) -> None:
    """``raw``: a text, those of a flag that may be repeated, or what a switch says."""
    try:
        if isinstance(raw, str):
            value = _parse_text(setting, raw)
        else:
            value = [item for text in raw for item in _parse_text(setting, text)] if setting.kind == "list" else raw
        found.values[setting.name] = Given(value, source)
    except json.JSONDecodeError as error:
        found.mistakes.append(f"{setting.name}: not JSON ({error}), got {setting.shown(raw)} ({source})")


def _parse_text(setting: Setting, text: str) -> Any:
    """JSON where it looks like JSON; otherwise lists are split and the rest is left to the field's own validator."""
    if (setting.kind, text.lstrip()[:1]) in (("json", "{"), ("list", "[")):
        return json.loads(text)
    if setting.kind == "list":
        items = [part.strip() for part in text.split(",") if part.strip()]
        return items or [""]  # the field refuses or takes it; without it, an empty key would be no key at all
    return text


def _unexpected(words: Sequence[str], known: Sequence[str]) -> list[str]:
    """One line an unknown option or surplus argument. A word behind an unknown option is its value: it may be secret
    and is not shown."""
    mistakes = []
    for before, word in zip(["", *words], words, strict=False):
        name = word.split("=")[0]
        if word.startswith("-"):
            mistakes.append(f"{name}: unknown option{suggestion(name, known)}")
        elif not before.startswith("-"):
            mistakes.append(f"command line: unexpected argument {word!r}")
    return mistakes


def _bare_name(setting: Setting) -> str:
    return f"{setting.name} argument"


def _add(group: argparse._ArgumentGroup, setting: Setting) -> None:
    suffix = f"[{setting.shown_default()}] [{setting.variable}]"
    text = f"{setting.description} {suffix}".replace("%", "%%")
    metavar = setting.type_name.removeprefix("list of ")
    if setting.kind == "bool":
        group.add_argument(*setting.flags, dest=setting.name, default=None, help=text, action="store_true")
        negative = [f"--no-{flag.removeprefix('--')}" for flag in setting.flags]
        group.add_argument(
            *negative, dest=setting.name, default=None, help=f"turns {setting.flag} off", action="store_false"
        )
        return
    if setting.names.positional:
        group.add_argument(_bare_name(setting), metavar=setting.bare_word, nargs="?", help=text)
    action = "append" if setting.kind == "list" else "store"
    group.add_argument(*setting.flags, dest=setting.name, default=None, help=text, action=action, metavar=metavar)
