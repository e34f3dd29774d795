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

LEASE_S = 2.0
Operate = Callable[..., Awaitable[Deployment]]


@pytest.fixture
async def operate(tmp_path: Path) -> AsyncIterator[Operate]:
    """Opens deployments on ``server`` (a `Server`, `Cluster` or `Watched` that is not started yet)."""
    async with AsyncExitStack() as stack:

        async def opened(server: Any = None, *, worker: dict[str, Any] | None = None, **options: Any) -> Deployment:
            made = await Deployment.open(
                tmp_path, server=server, worker={"lease_ttl_s": LEASE_S, **(worker or {})}, **options
            )
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
