"""A standalone server, or the primary that Sentinel names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from redis import asyncio as aredis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from common.errors import ConfigError
from common.transport.addresses import Address
from common.transport.connections import Client, PushSource, blocking_timeout_s, common_options
from common.transport.failures import ReadOnlyError, heeding_cancellation
from common.transport.line import Line
from common.transport.settings import RedisSettings

# Commands that go over a shared connection: none blocks, and the library leaves their answers as they are.
_FREQUENT: Final = frozenset({"EVALSHA", "EVAL", "PUBLISH"})


def _single_client(address: Address, settings: RedisSettings, timeout_s: float, connections: int) -> Client:
    options = {**common_options(settings, timeout_s), "retry": Retry(NoBackoff(), 0)}
    try:
        if address.kind == "sentinel":
            options |= {"username": address.username, "password": address.password, "db": address.db}
            if address.has_tls:
                options["ssl"] = True
            sentinel: Any = Sentinel(
                address.hosts, sentinel_kwargs=common_options(settings, settings.redis_connect_timeout_s)
            )  # type: ignore[no-untyped-call]
            return sentinel.master_for(address.service, max_connections=connections, **options)
        pool = aredis.BlockingConnectionPool.from_url(
            address.url, max_connections=connections, timeout=settings.redis_timeout_s, **options
        )
    except ValueError as error:
        raise ConfigError(f"redis_url: {error}", param="redis_url") from error
    return aredis.Redis(connection_pool=pool, driver_info=None)


def sentinels_of(client: Client) -> list[Client]:
    """The clients with which a client asks for its primary."""
    manager = getattr(client.connection_pool, "sentinel_manager", None)
    return list(manager.sentinels) if manager is not None else []


class SingleConnections:
    """A standalone server or the primary that Sentinel names."""

    is_cluster = False

    def __init__(self, address: Address, settings: RedisSettings) -> None:
        limit = settings.redis_max_connections
        self._commands = _single_client(address, settings, settings.redis_timeout_s, limit)
        self._blocking = _single_client(address, settings, blocking_timeout_s(settings), limit)
        self._line = Line(self._commands.connection_pool, settings.redis_timeout_s)

    async def execute(self, *args: Any, key: str, is_blocking: bool = False) -> Any:
        if args[0] in _FREQUENT:
            return await self._line.execute(*args)
        client = self._blocking if is_blocking else self._commands
        return await heeding_cancellation(client.execute_command(*args))

    async def execute_and_wait(self, *args: Any, key: str, replicas: int, wait_ms: int) -> tuple[Any, int]:
        pipe = self._commands.pipeline(transaction=False)
        pipe.execute_command(*args)
        pipe.execute_command("WAIT", replicas, wait_ms)
        reply, acknowledged = await heeding_cancellation(pipe.execute(raise_on_error=False))
        for answer in (reply, acknowledged):
            if isinstance(answer, Exception):
                raise answer
        return reply, int(acknowledged)

    async def refresh(self) -> None:
        self._line.retire()
        # Connections in use belong to other tasks, which would see an AttributeError if they were closed here.
        for client in (self._commands, self._blocking):
            await client.connection_pool.disconnect(inuse_connections=False)

    async def ping(self) -> None:
        await self._commands.execute_command("PING")
        role = (await self._commands.execute_command("ROLE"))[0]
        if role not in (b"master", "master"):
            raise ReadOnlyError(f"the server is a {role!r}")

    async def on_primaries(self, *args: str) -> list[Any]:
        return [await self._commands.execute_command(*args)]

    async def scan(self, pattern: str) -> list[bytes]:
        return [key async for key in self._commands.scan_iter(match=pattern, count=1000)]

    def push_sources(self, channels: Sequence[str]) -> list[PushSource]:
        return [PushSource(client=self._blocking, channels=tuple(channels), is_sharded=False)]

    async def close(self) -> None:
        await self._line.close()
        for client in (self._commands, self._blocking):
            await client.aclose()
            await client.connection_pool.aclose()
            for sentinel in sentinels_of(client):
                await sentinel.aclose()
