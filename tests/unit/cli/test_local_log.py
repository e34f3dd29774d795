"""Whose log `inspect`, `replay` and `tail` read. The servers are real."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.groups import LOG_READERS
from cli.local_log import SERVE_FILE, StateDirInUse, locked, opened_log
from cli.main import main
from cli.serve import no_announcement
from common.config import Loaded, load
from common.errors import LogUnavailable
from common.transport import EmbeddedServer, EmbeddedSettings, RedisSettings

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """Short, because the path of a socket may not be long."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def asked(state_dir: Path, *argv: str) -> Loaded:
    """Settings whose default is a log that is not there."""
    loaded = load(LOG_READERS, ["--state-dir", str(state_dir), "--redis-retry-s", "0", *argv], environ={})
    if "redis_url" in loaded.sources:
        return loaded
    nowhere = loaded[RedisSettings].model_copy(update={"redis_url": NOWHERE})
    return Loaded({**loaded.groups, RedisSettings: nowhere}, loaded.sources)


def start_log(state_dir: Path) -> EmbeddedServer:
    return EmbeddedServer.start(EmbeddedSettings(data_dir=state_dir / "log"))


async def word_in(loaded: Loaded) -> bytes | None:
    async with opened_log(loaded) as client:
        word: bytes | None = await client.command("GET", "word", key="word")
        return word


def leave_a_log(state_dir: Path) -> None:
    """As a serve that has ended leaves it."""
    server = start_log(state_dir)

    async def write() -> None:
        async with opened_log(asked(state_dir, "--redis-url", server.url)) as client:
            await client.command("SET", "word", "found", key="word")

    asyncio.run(write())
    server.stop()


def is_running(state_dir: Path) -> bool:
    """Whether a server holds the directory of the log."""
    server = start_log(state_dir)
    server.stop()
    return not server.is_ours


def test_the_log_that_a_serve_left_behind_is_started_for_the_reading_and_stopped(state_dir: Path) -> None:
    leave_a_log(state_dir)
    assert asyncio.run(word_in(asked(state_dir))) == b"found"
    assert not is_running(state_dir)


def test_what_a_killed_serve_has_left_announced_does_not_mislead(state_dir: Path) -> None:
    leave_a_log(state_dir)
    (state_dir / SERVE_FILE).write_text(json.dumps({"log": f"unix://{state_dir}/log/server.sock"}), encoding="utf-8")
    assert asyncio.run(word_in(asked(state_dir))) == b"found"


def test_while_it_is_read_no_serve_can_run_it_too(state_dir: Path) -> None:
    leave_a_log(state_dir)

    async def read() -> None:
        async with opened_log(asked(state_dir)):
            with pytest.raises(StateDirInUse, match=f"pid {os.getpid()}"), locked(state_dir):
                pass

    asyncio.run(read())
    with locked(state_dir):
        pass


def test_the_log_of_a_running_serve_is_read_as_it_is_and_left_running(state_dir: Path) -> None:
    leave_a_log(state_dir)
    with locked(state_dir):
        server = start_log(state_dir)
        try:
            (state_dir / SERVE_FILE).write_text(json.dumps({"log": server.url}), encoding="utf-8")
            assert asyncio.run(word_in(asked(state_dir))) == b"found"
            assert server.is_alive
        finally:
            server.stop()


def test_one_that_is_given_goes_first(state_dir: Path) -> None:
    leave_a_log(state_dir)
    with pytest.raises(LogUnavailable):
        asyncio.run(word_in(asked(state_dir, "--redis-url", NOWHERE)))


def test_whoever_waits_for_what_happens_starts_no_log_and_holds_no_directory(
    state_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_REDIS_URL", raising=False)
    leave_a_log(state_dir)
    assert main(["tail", "--state-dir", str(state_dir)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"headrace tail: no headrace serve runs in {state_dir}, so nothing happens there; ")
    with locked(state_dir):
        assert not is_running(state_dir)


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"log": ""}', '{"log": "unix:///nowhere/server.sock"}'])
def test_whoever_has_no_log_here_is_told_how_to_name_one(state_dir: Path, content: str | None) -> None:
    if content is not None:
        (state_dir / SERVE_FILE).write_text(content, encoding="utf-8")
    with pytest.raises(LogUnavailable, match=r"no headrace serve has its log in .* no --redis-url was given"):
        asyncio.run(word_in(asked(state_dir)))


def test_whoever_has_no_log_here_reads_one_line_that_helps(state_dir: Path) -> None:
    """As its own process, whose log nobody has configured."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    program = f"""
import sys
from cli.main import main
from common.transport import RedisSettings
RedisSettings.model_fields["redis_url"].default = {NOWHERE!r}
RedisSettings.model_rebuild(force=True)
sys.exit(main(["inspect", "x", "--redis-retry-s", "0", "--state-dir", {str(state_dir)!r}]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, env=environ, timeout=100
    )
    assert ended.returncode == 1
    assert ended.stderr == (
        f"headrace inspect: no headrace serve has its log in {state_dir} and no --redis-url was given; "
        "--state-dir names another place\n"
    )


def test_an_announcement_is_there_only_while_it_is_true(state_dir: Path) -> None:
    (state_dir / SERVE_FILE).write_text("{}", encoding="utf-8")
    with no_announcement(state_dir):
        assert not (state_dir / SERVE_FILE).exists()
        (state_dir / SERVE_FILE).write_text("{}", encoding="utf-8")
    assert not (state_dir / SERVE_FILE).exists()
