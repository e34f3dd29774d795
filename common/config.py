"""Settings: groups that each part owns, read once at start.

A part declares its group as a frozen `Settings` model; the process that joins the parts calls `load` with all groups
it needs and hands each part its own. Nobody else reads flags, the environment or the file::

    --field-name VALUE          wins over
    HEADRACE_FIELD_NAME         wins over
    field_name in the file      top level, or in a table named after its group ([scheduler] for SchedulerSettings)
    the default

An empty environment variable counts as not set. A list is comma-separated, or a JSON array where an item has a comma,
in the flag, the variable and a text of the file alike; a flag may also be repeated, and the file may have an array.
Every mistake of every source is collected, and all of them are reported together.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from common.config_fields import Flags, Setting, redacted, settings_of, variable_of
from common.config_sources import CONFIG_VARIABLE, Given, build_parser, read_environment, read_flags, read_toml
from common.errors import ConfigError

__all__ = ["Flags", "Loaded", "Settings", "known_settings", "load", "load_or_exit"]

S = TypeVar("S", bound="Settings")

EXIT_CONFIG: Final = 2
NAMES_FILE: Final = Path(__file__).with_name("setting_names.txt")


class Settings(BaseModel):
    """A frozen group of settings. Field names are unique over all groups of a process.

    Each field has a ``description`` (shown by ``--help`` and in the configuration reference) and its bounds. Its flag,
    variable and key follow from its name; ``Annotated[..., Flags(...)]`` adds other names. Fields of type
    ``SecretStr`` (also inside a tuple) are never shown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @classmethod
    def section(cls) -> str:
        """Name of the group in the file: ``KvCacheSettings`` is ``kv_cache``."""
        words = cls.__name__.removesuffix("Settings")
        return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(words))


@dataclass(frozen=True, slots=True)
class Loaded:
    """All groups of a process, and where each value that is not a default came from."""

    groups: Mapping[type[Settings], Settings]
    sources: Mapping[str, str]

    def __getitem__(self, group: type[S]) -> S:
        found = self.groups[group]
        assert isinstance(found, group)
        return found

    def given(self) -> dict[str, str]:
        """What was set on purpose, for the start-up log: secrets and passwords masked."""
        return {
            setting.name: "***" if setting.is_secret else redacted(_as_text(value))
            for setting, value in self._fields()
            if setting.name in self.sources
        }

    def environment(self, *only: type[Settings]) -> dict[str, str]:
        """The variables that give a child process the same values for the groups ``only``. Holds secrets."""
        return {
            setting.variable: _as_text(value)
            for setting, value in self._fields(*only)
            if setting.required or value != setting.default
        }

    def _fields(self, *only: type[Settings]) -> Iterator[tuple[Setting, Any]]:
        for kind, group in self.groups.items():
            if not only or kind in only:
                for setting in settings_of(kind.section(), kind):
                    yield setting, getattr(group, setting.name)


def load(
    groups: Sequence[type[Settings]],
    argv: Sequence[str] = (),
    *,
    environ: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    prog: str = "headrace",
    description: str = "",
) -> Loaded:
    """Read all ``groups`` from flags, environment, file and defaults.

    ``defaults``: values of this process for settings that nobody gave, in place of the fields' own.

    ``--help`` prints the settings in groups and raises ``SystemExit(0)``. Raises `ConfigError` whose message has one
    line a mistake, each naming the setting, the bound, the value and where it was given.
    """
    environ = os.environ if environ is None else environ
    defaults = defaults or {}
    settings = [
        replace(setting, default=defaults[setting.name], required=False) if setting.name in defaults else setting
        for group in groups
        for setting in settings_of(group.section(), group)
    ]
    _check_unique(settings)
    titles = {group.section(): _title(group) for group in groups}
    parser = build_parser(settings, titles, prog=prog, description=description)
    given, mistakes = _collect(parser, settings, argv, environ)
    built: dict[type[Settings], Settings] = {}
    for group in groups:
        own = {name: value for name, value in defaults.items() if name in group.model_fields}
        own |= {name: given[name].value for name in group.model_fields if name in given}
        try:
            built[group] = group.model_validate(own)
        except ValidationError as error:
            mistakes += _validation_mistakes(error, group, given)
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return Loaded(built, {name: item.source for name, item in given.items()})


def load_or_exit(
    groups: Sequence[type[Settings]],
    argv: Sequence[str],
    *,
    prog: str,
    description: str = "",
    defaults: Mapping[str, Any] | None = None,
) -> Loaded:
    """`load` for entry points: mistakes go to standard error, one line each, and the process exits with 2."""
    try:
        return load(groups, argv, prog=prog, description=description, defaults=defaults)
    except ConfigError as error:
        _give_up(prog, error)


def known_settings() -> tuple[dict[str, list[str]], set[str]]:
    """All processes' field names by section, and variables, as listed in ``setting_names.txt`` (generated, tested)."""
    names: dict[str, list[str]] = {}
    variables: set[str] = set()
    for line in NAMES_FILE.read_text(encoding="utf-8").splitlines():
        qualified, *further = line.split()
        section, name = qualified.split(".")
        names.setdefault(section, []).append(name)
        variables.update((variable_of(name), *further))
    return names, variables


def _collect(
    parser: argparse.ArgumentParser, settings: list[Setting], argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[dict[str, Given], list[str]]:
    elsewhere, variables = known_settings()
    flags = read_flags(parser, settings, argv)
    environment = read_environment(settings, environ, variables)
    values = environment.values | flags.values
    mistakes = flags.mistakes + environment.mistakes
    config = values.pop("config", Given(environ.get(CONFIG_VARIABLE), CONFIG_VARIABLE))
    if config.value:
        file = read_toml(Path(config.value), settings, elsewhere)
        values = file.values | values
        mistakes += file.mistakes
    return values, mistakes


def _validation_mistakes(error: ValidationError, group: type[Settings], given: Mapping[str, Given]) -> list[str]:
    by_name = {setting.name: setting for setting in settings_of(group.section(), group)}
    lines = []
    for item in error.errors(include_url=False):
        reason = item["msg"].removeprefix("Value error, ").replace("Input should", "should")
        setting = by_name.get(str(item["loc"][0])) if item["loc"] else None
        if setting is None:
            lines.append(f"[{group.section()}]: {reason}")
        elif item["type"] == "missing":
            lines.append(f"{setting.name}: is required: give {setting.flag} or {setting.variable}")
        else:
            origin = given.get(setting.name, Given(item["input"], "default"))
            lines.append(f"{setting.name}: {reason}, got {setting.shown(item['input'])} ({origin.source})")
    return lines


def _check_unique(settings: Sequence[Setting]) -> None:
    flags = [flag for setting in settings for flag in setting.flags]
    twice = sorted({flag for flag in flags if flags.count(flag) > 1})
    assert not twice, f"settings defined twice in one process: {', '.join(twice)}"


def _title(group: type[Settings]) -> str:
    return (group.__doc__ or group.__name__).strip().splitlines()[0].rstrip(".")


def _as_text(value: Any) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, tuple | list | frozenset | set):
        return json.dumps([_as_text(item) for item in value])
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value.value if isinstance(value, Enum) else value)


def _give_up(prog: str, error: ConfigError) -> NoReturn:
    for line in error.message.splitlines():
        sys.stderr.write(f"{prog}: {line}\n")
    raise SystemExit(EXIT_CONFIG)
