"""A deployment for each test that hurts it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults.deployment import Deployment

LEASE_S = 2.0  # a busy machine keeps a worker from renewing for a while, too
Deploy = Callable[..., Awaitable[Deployment]]


@pytest.fixture
async def deploy(tmp_path: Path) -> AsyncIterator[Deploy]:
    """Opens deployments with short leases; all are closed after the test."""
    async with AsyncExitStack() as stack:

        async def opened(*, worker: dict[str, Any] | None = None, **options: Any) -> Deployment:
            made = await Deployment.open(tmp_path, worker={"lease_ttl_s": LEASE_S, **(worker or {})}, **options)
            stack.push_async_callback(made.close)
            return made

        yield opened
