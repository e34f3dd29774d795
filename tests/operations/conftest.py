"""Deployments on a server of one's choice."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.faults.answers import Answer
from tests.faults.client import Transcript
from tests.faults.deployment import Deployment
from tests.servers import Sentinel, Server

LEASE_S = 1.0
Operate = Callable[..., Awaitable[Deployment]]


class Watched:
    """A primary with replicas, watched by one sentinel."""

    def __init__(self, replicas: int) -> None:
        self.primary = Server(fsync="everysec")
        options = {"replicaof": f"127.0.0.1 {self.primary.port}"}
        self.replicas = [Server(fsync="everysec", options=options) for _ in range(replicas)]
        self.sentinel = Sentinel(self.primary)

    @property
    def url(self) -> str:
        return self.sentinel.url

    def start(self) -> Watched:
        for server in (self.primary, *self.replicas):
            server.start()
        self.primary.wait_for_replica()
        self.sentinel.start()
        self.sentinel.wait_for_replica()
        return self

    def stop(self) -> None:
        for server in (self.sentinel, *self.replicas, self.primary):
            server.stop()


@pytest.fixture
async def operate(tmp_path: Path) -> AsyncIterator[Operate]:
    """Opens deployments on ``server`` (a `Server`, `Cluster` or `Watched` that is not started yet)."""
    async with AsyncExitStack() as stack:

        async def opened(server: Any = None, *, worker: dict[str, Any] | None = None, **options: Any) -> Deployment:
            class OnServer(Deployment):
                def __init__(self, *args: Any, **settings: Any) -> None:
                    super().__init__(*args, **settings)
                    if server is not None:
                        self.server.stop()
                        self.server = server

            made = await OnServer.open(tmp_path, worker={"lease_ttl_s": LEASE_S, **(worker or {})}, **options)
            stack.push_async_callback(made.close)
            return made

        yield opened


def assert_whole(transcripts: Iterable[Transcript], expected: dict[str, Answer]) -> None:
    """Every client has the answer of an undisturbed run, to the token."""
    for transcript in transcripts:
        assert not transcript.gave_up, (transcript.feature.name, transcript.gave_up, transcript.refusals)
        assert transcript.answer() == expected[transcript.feature.name], transcript.request_id


@contextlib.asynccontextmanager
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    """Connections are not used twice: a balancer would choose for each request, too."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as opened:
        yield opened
