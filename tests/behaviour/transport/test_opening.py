"""Opening the log: what is told while it is not there, and what its first process fixes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from common.transport import LogClient, RedisSettings
from common.transport.connections import Connections
from common.transport.deployment import agree_partitions
from tests.servers import Server, free_port


class Emptied:
    """Connections to a log that loses a key right after the first write of it."""

    def __init__(self, connections: Connections) -> None:
        self.is_cluster = connections.is_cluster
        self.num_writes = 0
        self._connections = connections

    async def execute(self, command: str, *args: Any, key: str) -> Any:
        answer = await self._connections.execute(command, *args, key=key)
        if command == "SET":
            self.num_writes += 1
            if self.num_writes == 1:
                await self._connections.execute("DEL", key, key=key)
        return answer


async def test_a_partition_count_that_vanishes_as_it_is_agreed_on_is_agreed_on_again(valkey: Server) -> None:
    settings = RedisSettings(redis_url=valkey.url, key_prefix="vanishing:", partitions=3)
    client = await LogClient.open(settings)
    try:
        await client.connections.execute("DEL", client.keys.layout, key=client.keys.layout)
        emptied = Emptied(client.connections)
        assert await agree_partitions(emptied, client.keys, settings) == 3  # type: ignore[arg-type]
        assert emptied.num_writes == 2
    finally:
        await client.close()


async def test_the_first_line_about_a_log_that_is_not_there_names_the_setting_and_no_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = f"redis://me:hush@127.0.0.1:{free_port()}/0"
    opening = asyncio.create_task(LogClient.open(RedisSettings(redis_url=url, redis_retry_s=600.0)))
    try:
        async with asyncio.timeout(60):
            while not caplog.messages and not opening.done():  # noqa: ASYNC110 - logging has no event to wait for
                await asyncio.sleep(0.01)
    finally:
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await opening
    first = caplog.messages[0]
    assert "--redis-url or HEADRACE_REDIS_URL" in first
    assert url.replace("hush", "***") in first
    assert "hush" not in caplog.text
