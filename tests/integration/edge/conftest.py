"""One Valkey for all tests of the edge, a key prefix for each; one edge and one worker unless a test makes its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from common.transport import RedisSettings
from tests.integration.edge.running_edge import FAST, ThreadedEdge
from tests.integration.edge.scripted_worker import ScriptedWorker
from tests.integration.edge.wire import hang_up
from tests.servers import Server, running


@pytest.fixture(scope="package")
def valkey() -> Iterator[Server]:
    with running(Server(fsync="everysec")) as server:
        yield server


@pytest.fixture
def redis_settings(valkey: Server) -> RedisSettings:
    return RedisSettings(redis_url=valkey.url, key_prefix=f"{secrets.token_hex(4)}:", partitions=2)


@pytest.fixture(autouse=True)
async def connections() -> AsyncIterator[None]:
    yield
    hang_up()
    await asyncio.sleep(0)  # a transport closes in the next turn of the loop


@pytest.fixture
async def worker(redis_settings: RedisSettings) -> AsyncIterator[ScriptedWorker]:
    started = await ScriptedWorker(redis_settings).start()
    yield started
    await started.leave()


@pytest.fixture
def make_edge(redis_settings: RedisSettings, worker: ScriptedWorker) -> Iterator[Callable[..., Any]]:
    """Starts edges in threads; the settings groups that differ are given by name."""
    edges: list[ThreadedEdge] = []

    def make(**groups: Any) -> ThreadedEdge:
        edge = ThreadedEdge(groups.pop("redis", redis_settings), **groups)
        edges.append(edge)
        return edge

    yield make
    for edge in edges:
        edge.stop()


@pytest.fixture
async def edge(make_edge: Callable[..., ThreadedEdge]) -> ThreadedEdge:
    return await asyncio.to_thread(make_edge().start)


@pytest.fixture
async def edge_that_pings(make_edge: Callable[..., ThreadedEdge]) -> ThreadedEdge:
    streams = FAST.model_copy(update={"ping_interval_s": 0.3, "first_frame_hold_s": 0.1})
    return await asyncio.to_thread(make_edge(streams=streams).start)
