"""Whose log `inspect`, `replay` and `tail` read."""

from __future__ import annotations

import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.groups import LOG_READERS
from cli.local_log import log_settings, open_log
from common.config import Loaded, load
from common.errors import LogUnavailable
from common.transport import RedisSettings

DEFAULT = RedisSettings().redis_url


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """Short, because the path of a socket may not be long."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def url_read(state_dir: Path, *argv: str) -> str:
    loaded = load(LOG_READERS, ["--state-dir", str(state_dir), *argv], environ={})
    return log_settings(loaded).redis_url


def test_the_log_of_a_running_serve_is_read_unless_another_is_given(state_dir: Path) -> None:
    path = state_dir / "server.sock"
    (state_dir / "serve.json").write_text(json.dumps({"log": f"unix://{path}"}), encoding="utf-8")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert url_read(state_dir) == f"unix://{path}"
        assert url_read(state_dir, "--redis-url", "redis://other:1/0") == "redis://other:1/0"
    path.unlink()
    assert url_read(state_dir) == DEFAULT


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"log": ""}', '{"log": "unix:///nowhere/server.sock"}'])
def test_without_an_embedded_log_here_the_default_is_read(state_dir: Path, content: str | None) -> None:
    if content is not None:
        (state_dir / "serve.json").write_text(content, encoding="utf-8")
    assert url_read(state_dir) == DEFAULT


async def test_whoever_has_no_log_here_is_told_how_to_name_one(state_dir: Path) -> None:
    loaded = load(LOG_READERS, ["--state-dir", str(state_dir), "--redis-retry-s", "0"], environ={})
    nowhere = loaded[RedisSettings].model_copy(update={"redis_url": "redis://127.0.0.1:1/0"})
    groups = {**loaded.groups, RedisSettings: nowhere}
    with pytest.raises(LogUnavailable, match=r"no headrace serve runs in .* no --redis-url was given"):
        await open_log(Loaded(groups, loaded.sources))
