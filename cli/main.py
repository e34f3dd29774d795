"""``headrace COMMAND``: finds the command's module, imports only that, and ends with its exit code."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from common.config_fields import suggestion
from common.errors import ConfigError, HeadraceError


@dataclass(frozen=True, slots=True)
class Command:
    """``module`` has ``main(argv, prog) -> exit code``."""

    module: str
    summary: str


COMMANDS: Final[Mapping[str, Command]] = {
    "serve": Command("cli.serve", "everything on this machine: log, workers and edges; without a model, a small demo"),
    "edge": Command("cli.edge", "one edge: the OpenAI API over HTTP; needs only a Redis URL"),
    "worker": Command("cli.worker", "one engine worker: a model, fed from the log"),
    "model import": Command("cli.model_import", "bring a model into a directory that a worker loads fast"),
    "inspect": Command("cli.inspect", "what happened to a request, from its events"),
    "replay": Command("cli.replay", "run a request again and compare it with its log, token for token"),
    "tail": Command("cli.tail", "everything that happens, event by event"),
    "bench serve": Command("cli.bench.serve", "load any OpenAI-compatible server and say how it did"),
    "bench engine": Command("cli.bench.engine", "the engine by itself: no HTTP, no log"),
    "bench long-prompts": Command("cli.bench.long_prompts", "streams beside long prompts: pauses against waiting"),
    "bench step": Command("cli.bench.step", "where the time of one engine step goes"),
}

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. A typed error is one line on standard error; 2 for mistakes in settings, 1 for all else."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else EXIT_USAGE
    if words[0] in ("-V", "--version", "version"):
        print(f"headrace {metadata.version('headrace')}")
        return 0
    name = next((name for name in COMMANDS if words[: len(name.split())] == name.split()), None)
    if name is None:
        return _unknown(words)
    prog = f"headrace {name}"
    try:
        result: int = importlib.import_module(COMMANDS[name].module).main(words[len(name.split()) :], prog)
    except HeadraceError as error:
        for line in error.message.splitlines():
            print(f"{prog}: {line}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return result


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: headrace COMMAND [options]",
            "",
            "commands:",
            *lines,
            "",
            "headrace COMMAND --help lists its settings, with their defaults and environment variables.",
        ]
    )


def _unknown(words: Sequence[str]) -> int:
    print(
        f"headrace: unknown command {words[0]!r}{suggestion(words[0], COMMANDS)}; see headrace --help", file=sys.stderr
    )
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
