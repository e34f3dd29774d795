"""The generated pages of the documentation: ``python -m cli.reference`` writes them, a test fails when one is stale."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final, get_args

import msgspec

from cli.groups import ALL, EDGE, LOG_READERS, SERVE, WORKER
from cli.main import COMMANDS
from common import errors, events
from common.config import Settings
from common.config_fields import Setting, settings_of
from common.errors import HeadraceError
from common.telemetry.metrics import EdgeMetrics, Instrument, WorkerMetrics
from edge import errors as edge_errors

ROOT: Final = Path(__file__).parents[1]
_GENERATED: Final = "<!-- Written by `make docs` from the source; do not edit. -->"

_CONFIGURATION: Final = f"""# Configuration

{_GENERATED}

A setting is read from its flag, else its environment variable, else the TOML file given by `--config FILE` or
`HEADRACE_CONFIG`, else it has its default. In the file a setting stands at the top level or in the table of its group.
A list is comma-separated, or a JSON array where an item has a comma, in flag, variable and file alike; a flag may also
be repeated, and the file may have an array. Switches: `--x` and `--no-x`. An empty variable counts as not set. Unknown
options, variables and keys are mistakes; all mistakes are reported together, and the process exits with 2. Secrets
are never shown.

```toml
redis_url = "redis://log:6379/0"

[scheduler]
max_num_seqs = 32
```
"""
_METRICS: Final = f"""# Metrics

{_GENERATED}

Every process shows its metrics in Prometheus' text format at `/metrics`: an edge on its API port, a worker on
`--metrics-port`. Seconds and bytes throughout. A fact is counted by one side only, so a sum over all processes is
right. Under `headrace serve` the first edge's page holds the workers' metrics too (`--federate-metrics`).
"""
_ERRORS: Final = f"""# Error codes

{_GENERATED}

Every error answer, and the last chunk of a stream that fails, holds OpenAI's error object. Its `code` is one of
these. Retryable: the same call may succeed later; 429 and 503 say when (`Retry-After`).

| code | status | retryable | meaning |
| --- | --- | --- | --- |
"""
_EVENTS: Final = f"""# Events

{_GENERATED}

What is written to the log, schema version {events.SCHEMA_VERSION}: msgpack maps. Readers ignore fields that they do
not know and refuse kinds that they do not know. The number of an event is its position in the request's stream.
"""


def main() -> int:
    for path, page in PAGES.items():
        target = ROOT / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page(), encoding="utf-8")
    return 0


def setting_names() -> str:
    """``section.field`` and further variables of every setting of every process, which share an environment or file."""
    return "".join(
        " ".join((f"{setting.section}.{setting.name}", *setting.names.variables)) + "\n"
        for group in _groups()
        for setting in _settings(group)
    )


def configuration() -> str:
    lines = [_CONFIGURATION]
    for group in _groups():
        lines += [f"## {_title(group)}", "", f"File table `[{group.section()}]`; read by {_readers(group)}.", ""]
        lines += ["| flag | variable | default | bounds | meaning |", "| --- | --- | --- | --- | --- |"]
        lines += [_row(setting) for setting in _settings(group)]
        lines.append("")
    return "\n".join(lines)


def metrics() -> str:
    lines = [_METRICS]
    for title, catalogue in (("Edge", EdgeMetrics().catalogue), ("Worker", WorkerMetrics("demo").catalogue)):
        lines += [f"## {title}", "", "| name | kind | labels | meaning |", "| --- | --- | --- | --- |"]
        lines += [_metric_row(item) for item in catalogue]
        lines.append("")
    return "\n".join(lines)


def error_codes() -> str:
    return _ERRORS + "".join(
        f"| `{kind.code}` | {edge_errors.status_of(kind.__new__(kind))} "
        f"| {'yes' if kind.retryable else 'no'} | {_first_line(kind)} |\n"
        for kind in _error_kinds()
    )


def event_kinds() -> str:
    lines = [_EVENTS]
    for kind in _STRUCTURES:
        tag = kind.__struct_config__.tag
        lines += [f"## {kind.__name__}{f' (`{tag}`)' if tag else ''}", "", _document(kind), ""]
        lines += ["| field | meaning |", "| --- | --- |"]
        comments = _field_comments(kind)
        lines += [f"| `{name}` | {_cell(comments.get(name, ''))} |" for name in kind.__struct_fields__]
        lines.append("")
    return "\n".join(lines)


_STRUCTURES: Final[tuple[type[msgspec.Struct], ...]] = (
    events.EngineRequest,
    events.SamplingParams,
    *get_args(events.OutputEvent),
    *get_args(events.InboxEvent),
    events.TokenLogprobs,
    events.Usage,
    events.Grammar,
)
PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "common/setting_names.txt": setting_names,
    "docs/configuration.md": configuration,
    "docs/metrics.md": metrics,
    "docs/errors.md": error_codes,
    "docs/events.md": event_kinds,
}


def _groups() -> tuple[type[Settings], ...]:
    return (*ALL, *_commands())


def _commands() -> dict[type[Settings], str]:
    """Groups that a command's own module defines, each with its command."""
    return {
        group: name
        for name, command in COMMANDS.items()
        for group in vars(importlib.import_module(command.module)).values()
        if isinstance(group, type) and issubclass(group, Settings) and group.__module__ == command.module
    }


def _settings(group: type[Settings]) -> list[Setting]:
    return settings_of(group.section(), group)


def _readers(group: type[Settings]) -> str:
    if group not in ALL:
        return f"`headrace {_commands()[group]}`"
    commands = (
        ("serve", SERVE),
        ("worker", WORKER),
        ("edge", EDGE),
        *((name, LOG_READERS) for name in ("inspect", "replay", "tail")),
    )
    return ", ".join(f"`headrace {name}`" for name, groups in commands if group in groups)


def _row(setting: Setting) -> str:
    flags = ", ".join(f"`{flag}`" for flag in setting.flags)
    if setting.names.positional:
        flags = f"`{setting.bare_word}`, {flags}"
    variables = ", ".join(f"`{variable}`" for variable in setting.variables)
    bounds = _cell("; ".join(part for part in (setting.type_name, setting.bounds) if part))
    return f"| {flags} | {variables} | {_cell(setting.shown_default())} | {bounds} | {_cell(setting.description)} |"


def _metric_row(item: Instrument) -> str:
    labels = ", ".join(f"`{label}`" for label in item.labels)
    return f"| `{item.name}` | {item.kind} | {labels} | {_cell(item.meaning)} |"


def _error_kinds() -> list[type[HeadraceError]]:
    """All of the tree but configuration mistakes, which end a process before it could answer anybody."""

    def below(kind: type[HeadraceError]) -> Iterator[type[HeadraceError]]:
        for child in kind.__subclasses__():
            if child.__module__ in (errors.__name__, edge_errors.__name__) and child is not errors.ConfigError:
                if not child.__name__.startswith("_"):
                    yield child
                yield from below(child)

    return [HeadraceError, *below(HeadraceError)]


def _field_comments(kind: type[msgspec.Struct]) -> dict[str, str]:
    source = inspect.getsource(kind)
    return dict(re.findall(r"^    (\w+):[^#\n]*#\s*(.+)$", source, re.MULTILINE))


def _title(group: type[Settings]) -> str:
    return _first_line(group).rstrip(".")


def _first_line(kind: type) -> str:
    return _cell((kind.__doc__ or "").strip().partition("\n")[0])


def _document(kind: type) -> str:
    return " ".join((kind.__doc__ or "").replace("``", "`").split())


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    sys.exit(main())
