"""The command line: finding the command, telling mistakes, exit codes."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import types
from collections.abc import Sequence

import pytest

from cli import groups
from cli.main import COMMANDS, Command, main
from edge.__main__ import GROUPS as EDGE_GROUPS
from engine_worker.__main__ import GROUPS as WORKER_GROUPS


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert [name for name in COMMANDS if f"  {name} " not in text] == []


def test_nothing_at_all_is_a_mistake_and_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: headrace" in capsys.readouterr().out


def test_an_unknown_command_is_answered_with_the_likely_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    assert capsys.readouterr().err == ("headrace: unknown command 'sevre' (did you mean serve?); see headrace --help\n")


@pytest.mark.parametrize(("argv", "code"), [(["bench"], 2), (["bench", "--help"], 0)])
def test_a_word_that_begins_commands_shows_them(argv: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == code
    text = capsys.readouterr().out
    assert "  bench serve " in text
    assert "  inspect " not in text


def test_a_mistake_in_the_second_word_is_answered_with_the_likely_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sevre"]) == 2
    assert "unknown command 'bench sevre' (did you mean bench serve?)" in capsys.readouterr().err


def test_a_package_that_is_not_installed_is_named_with_what_brings_it() -> None:
    program = """
import sys
sys.modules["aiohttp"] = None
from cli.main import main
sys.exit(main(["bench", "serve"]))
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert ended.stderr == (
        "headrace bench serve: needs aiohttp, which is not installed: pip install 'headrace[bench]', "
        "or make setup in the repository\n"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_in_groups(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(COMMANDS[name].module)
    with pytest.raises(SystemExit) as caught:
        module.main(["--help"], f"headrace {name}")
    assert caught.value.code == 0
    assert f"usage: headrace {name}" in capsys.readouterr().out


def test_mistakes_in_settings_are_lines_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--workers", "0", "--colour"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "headrace serve: --colour: unknown option",
        "headrace serve: workers: should be greater than or equal to 1, got '0' (--workers)",
    ]


def test_the_commands_read_the_groups_that_their_processes_read() -> None:
    assert set(groups.EDGE) == set(EDGE_GROUPS)
    assert set(groups.WORKER) == set(WORKER_GROUPS)


@pytest.mark.parametrize(
    "says",
    ['print("line\\n" * 100_000)', 'print("line")', 'print("line", flush=True)'],
    ids=["much", "little", "flushed"],
)
def test_output_that_nobody_reads_to_its_end_is_no_mistake(says: str) -> None:
    program = f"""
import sys, types
from cli import main
command = types.ModuleType("command")
command.main = lambda argv, prog: {says} or 0
sys.modules["command"] = command
main.COMMANDS = {{"say": main.Command("command", "")}}
sys.exit(main.main(["say"]))
"""
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=100
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_another_pipe_that_breaks_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(argv: Sequence[str], prog: str) -> int:
        raise BrokenPipeError(f"{prog} {argv}")

    command = types.ModuleType("command")
    monkeypatch.setattr(command, "main", breaks, raising=False)
    monkeypatch.setitem(sys.modules, "command", command)
    monkeypatch.setattr("cli.main.COMMANDS", {"break": Command("command", "")})
    with pytest.raises(BrokenPipeError):
        main(["break"])


@pytest.mark.parametrize("argv", [["--help"], ["edge", "--help"]])
def test_an_edge_image_without_torch_can_run_its_command(argv: list[str]) -> None:
    program = f"""
import sys
sys.modules["torch"] = None
sys.modules["transformers"] = None
from cli.main import main
sys.exit(main({argv!r}))
"""
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=300)
