"""Every kind of server at hand, each started once; every test has a key prefix of its own."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from common.transport import LogClient, RedisSettings
from tests.behaviour.transport.world import Clock, World
from tests.servers import Cluster, Server, debian_redis, running

_KINDS = ["valkey", "redis7", "cluster"]


@pytest.fixture(scope="session")
def valkey() -> Iterator[Server]:
    with running(Server(fsync="everysec")) as server:
        yield server


@pytest.fixture(scope="session")
def redis7() -> Iterator[Server]:
    binary = debian_redis()
    if binary is None:
        pytest.skip("no redis-server on PATH")
    with running(Server(binary=binary, fsync="everysec")) as server:
        yield server


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    nodes = Cluster()
    try:
        yield nodes.start()
    finally:
        nodes.stop()


@pytest.fixture(params=_KINDS)
def log_settings(request: pytest.FixtureRequest) -> RedisSettings:
    """A deployment of its own on each kind of server."""
    server: Server | Cluster = request.getfixturevalue(request.param)
    return RedisSettings(redis_url=server.url, key_prefix=f"{secrets.token_hex(4)}:", partitions=3)


@pytest.fixture
async def client(log_settings: RedisSettings) -> AsyncIterator[LogClient]:
    opened = await LogClient.open(log_settings)
    try:
        yield opened
    finally:
        await opened.close()


@pytest.fixture
async def world(client: LogClient) -> AsyncIterator[World]:
    small = World(client)
    try:
        yield small
    finally:
        small.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Of those who look for dead workers."""
    made = Clock()
    monkeypatch.setattr("common.transport.absence.time", made)
    return made
