"""``headrace COMMAND``: finds the command's module, imports only that, and ends with its exit code."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from common.config_fields import suggestion
from common.errors import ConfigError, HeadraceError


@dataclass(frozen=True, slots=True)
class Command:
    """``module`` has ``main(argv, prog) -> exit code``; ``extra`` of the distribution brings what it imports."""

    module: str
    summary: str
    extra: str = ""


COMMANDS: Final[Mapping[str, Command]] = {
    "serve": Command(
        "cli.serve",
        "everything on this machine: log, workers and edges; without a model, a small demo",
        "edge,worker,embedded",
    ),
    "edge": Command("cli.edge", "one edge: the OpenAI API over HTTP; needs only a Redis URL", "edge"),
    "worker": Command("cli.worker", "one engine worker: a model, fed from the log", "worker"),
    "model import": Command("cli.model_import", "bring a model into a directory that a worker loads fast", "worker"),
    "inspect": Command("cli.inspect", "what happened to a request, from its events"),
    "replay": Command("cli.replay", "run a request again and compare it with its log, token for token", "worker"),
    "tail": Command("cli.tail", "everything that happens, event by event"),
    "bench serve": Command("cli.bench.serve", "load any OpenAI-compatible server and say how it did", "bench"),
    "bench engine": Command("cli.bench.engine", "the engine by itself: no HTTP, no log", "worker"),
    "bench long-prompts": Command(
        "cli.bench.long_prompts", "streams beside long prompts: pauses against waiting", "bench"
    ),
    "bench step": Command("cli.bench.step", "where the time of one engine step goes", "worker"),
}

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_UNREAD: Final = 128 + signal.SIGPIPE  # as a shell tells of others that this ends
_STDOUT: Final = 1
_OWN: Final = ("common", "edge", "engine_worker", "cli", "bench")


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
        module = importlib.import_module(COMMANDS[name].module)
    except ModuleNotFoundError as error:
        return _lacking(prog, COMMANDS[name], error)
    try:
        result: int = module.main(words[len(name.split()) :], prog)
        sys.stdout.flush()
    except BrokenPipeError:
        if not _is_unread():
            raise
        return EXIT_UNREAD
    except HeadraceError as error:
        for line in error.message.splitlines():
            print(f"{prog}: {line}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return result


def _is_unread() -> bool:
    """Whether a broken pipe is that of our output: its reader, such as ``head``, has enough. The rest goes nowhere."""
    output = select.poll()
    output.register(_STDOUT, 0)  # errors are told in any case
    if not output.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _STDOUT)
    os.close(nowhere)
    return True


def overview(first_word: str = "") -> str:
    """All commands, or those that begin with ``first_word``."""
    shown = {name: command for name, command in COMMANDS.items() if first_word in ("", name.split()[0])}
    width = max(map(len, shown))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in shown.items()]
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
    """Of two words when the first begins commands; that word alone shows them."""
    is_group = any(name.split()[0] == words[0] for name in COMMANDS)
    if is_group and (len(words) == 1 or words[1] in ("-h", "--help")):
        print(overview(words[0]))
        return EXIT_USAGE if len(words) == 1 else 0
    asked = " ".join(words[: 1 + is_group])
    print(f"headrace: unknown command {asked!r}{suggestion(asked, COMMANDS)}; see headrace --help", file=sys.stderr)
    return EXIT_USAGE


def _lacking(prog: str, command: Command, error: ModuleNotFoundError) -> int:
    """A package that is not installed is named; a module of ours that is missing is a mistake of ours. Raises that."""
    package = (error.name or "").partition(".")[0]
    if not command.extra or package in _OWN:
        raise error
    print(
        f"{prog}: needs {package}, which is not installed: pip install 'headrace[{command.extra}]', "
        "or make setup in the repository",
        file=sys.stderr,
    )
    return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
