"""The embedded server: its lock, its socket, its life and death."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.transport import EmbeddedServer, EmbeddedSettings, LogClient, RedisSettings
from tests.behaviour.transport.world import World
from tests.servers import debian_redis, free_port


@pytest.fixture
def data_dir() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="headrace-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pid: int, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.02)


async def test_requests_survive_a_stop_and_a_kill(data_dir: Path) -> None:
    settings = EmbeddedSettings(data_dir=data_dir, embedded_fsync="always")
    server = EmbeddedServer.start(settings)
    assert server.is_ours
    submitted = []
    for kill in (False, True, False):
        client = await LogClient.open(RedisSettings(redis_url=server.url, durability="strict"))
        assert client.keys.partitions == 1
        world = World(client)
        for request in submitted:
            assert (await world.reading.attach(request.request_id, after=0, edge_id="")).spec == request
        submitted.append(await world.submit_new())
        await client.close()
        if kill:
            os.kill(server.pid, signal.SIGKILL)
        server.stop()
        wait_until_dead(server.pid)
        server = EmbeddedServer.start(settings)
    server.stop()


def test_a_second_start_finds_the_running_server(data_dir: Path) -> None:
    settings = EmbeddedSettings(data_dir=data_dir)
    first = EmbeddedServer.start(settings)
    second = EmbeddedServer.start(settings)
    assert (second.pid, second.url, second.is_ours) == (first.pid, first.url, False)
    second.stop()
    assert is_alive(first.pid)
    first.stop()
    assert not is_alive(first.pid)
    first.stop()


def test_many_starts_at_once_make_one_server(data_dir: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from common.transport.embedded import *;"
        "s = EmbeddedServer.start(EmbeddedSettings(data_dir=Path(sys.argv[1])));"
        "print(s.pid, s.is_ours, flush=True); sys.stdin.read(); s.stop()"
    )
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", code, data_dir], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    lines = [starter.stdout.readline().split() for starter in starters if starter.stdout]
    assert len({pid for pid, _ in lines}) == 1
    assert sorted(is_ours for _, is_ours in lines) == ["False", "False", "True"]
    for starter in starters:
        starter.communicate(timeout=120)
    wait_until_dead(int(lines[0][0]))


@pytest.mark.skipif(sys.platform != "linux", reason="the death signal is Linux's")
def test_the_server_dies_with_a_killed_parent(data_dir: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from common.transport.embedded import *;"
        "s = EmbeddedServer.start(EmbeddedSettings(data_dir=Path(sys.argv[1]))); print(s.pid, flush=True);"
        "sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, data_dir], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    parent.communicate(timeout=120)
    wait_until_dead(pid)
    again = EmbeddedServer.start(EmbeddedSettings(data_dir=data_dir))  # its lock died with it
    assert again.is_ours
    again.stop()


def test_only_this_user_reaches_the_socket(data_dir: Path) -> None:
    server = EmbeddedServer.start(EmbeddedSettings(data_dir=data_dir / "new"))
    path = Path(server.url.removeprefix("unix://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    server.stop()


def test_a_long_directory_name_gets_a_short_socket(data_dir: Path) -> None:
    deep = data_dir / ("d" * 60) / ("e" * 60)
    server = EmbeddedServer.start(EmbeddedSettings(data_dir=deep))
    path = Path(server.url.removeprefix("unix://"))
    assert len(os.fsencode(path)) < 104
    assert (deep / "appendonlydir").is_dir()
    assert EmbeddedServer.start(EmbeddedSettings(data_dir=deep)).pid == server.pid
    server.stop()
    shutil.rmtree(path.parent)


async def test_loopback_tcp_on_request(data_dir: Path) -> None:
    port = free_port()
    server = EmbeddedServer.start(EmbeddedSettings(data_dir=data_dir, embedded_port=port))
    client = await LogClient.open(RedisSettings(redis_url=f"redis://127.0.0.1:{port}"))
    await client.ping()
    await client.close()
    server.stop()


def test_any_server_binary_can_be_named(data_dir: Path) -> None:
    binary = debian_redis()
    if binary is None:
        pytest.skip("no redis-server on PATH")
    server = EmbeddedServer.start(EmbeddedSettings(data_dir=data_dir, embedded_binary=binary))
    assert server.is_ours
    server.stop()


def test_a_binary_that_is_none_is_named_in_the_error(data_dir: Path) -> None:
    with pytest.raises(ConfigError, match="embedded_binary"):
        EmbeddedServer.start(EmbeddedSettings(data_dir=data_dir, embedded_binary=data_dir / "nothing"))
    with pytest.raises(ConfigError, match="ended at once"):
        EmbeddedServer.start(EmbeddedSettings(data_dir=data_dir, embedded_binary=Path("/bin/false")))
