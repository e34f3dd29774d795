"""The redis library, met in one place: clients of each kind, and what its failures mean.

Library retries are off everywhere: they repeat commands that must not be repeated, and go back to the old address
after a failover. `protocol=2` keeps maintenance notifications (and a broken stale-connection check) out of the way.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import redis
from redis import asyncio as aredis
from redis.asyncio.cluster import ClusterNode, PipelineCommand, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode as SyncClusterNode
from redis.cluster import RedisCluster as SyncRedisCluster
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    MasterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    SlotNotCoveredError,
    TryAgainError,
)
from redis.retry import Retry as SyncRetry
from redis.sentinel import Sentinel as SyncSentinel

from common.errors import ConfigError, HeadraceError, LogCorrupt, LogUnavailable
from common.transport.addresses import Address, parse_address
from common.transport.line import Line
from common.transport.settings import RedisSettings

_T = TypeVar("_T")

MAX_BLOCK_MS: Final = 5000
_SPARE_CONNECTIONS: Final = 4  # to a node: for redirected calls, and for the library's questions about the cluster

Client = Any
"""One of the library's clients: its own types are unions of the synchronous and the asynchronous form."""

TRANSIENT: Final = (
    redis.ConnectionError,
    redis.TimeoutError,
    ReadOnlyError,
    ClusterDownError,
    MasterDownError,
    SlotNotCoveredError,
    TryAgainError,
    RedisClusterException,
    OSError,
)
"""Failures after which a repeatable call is tried again on a fresh connection."""

# Commands that go over a shared connection: none blocks, and the library leaves their answers as they are.
_FREQUENT: Final = frozenset({"EVALSHA", "EVAL", "PUBLISH"})

# Answers of a healthy connection that say "not now".
_REFUSALS: Final = ("MISCONF", "NOREPLICAS", "BUSY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "UNBLOCKED")


def translated(error: Exception) -> HeadraceError:
    """Our error for one of the library's."""
    text = str(error)
    if isinstance(error, AuthenticationError):
        return LogUnavailable(f"the server refuses the credentials: {text}")
    if isinstance(error, TRANSIENT):
        return LogUnavailable(f"the log cannot be reached: {type(error).__name__}: {text}")
    if isinstance(error, OutOfMemoryError) or text.startswith(_REFUSALS):
        return LogUnavailable(f"the log refuses: {text}")
    return LogCorrupt(f"the log does not understand: {text}")


def is_missing_group(error: ResponseError) -> bool:
    """Whether the consumer group has vanished (the stream was deleted or the server lost its data)."""
    return "NOGROUP" in str(error)


async def heeding_cancellation(call: Awaitable[_T]) -> _T:
    """The call's result, or `CancelledError` when the task was cancelled meanwhile.

    The library sends through `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that meets the end
    of what it waits for: the task would live on, and whoever waits for its end would wait for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    result = await call
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return result


async def _on_shared_node(call: Awaitable[_T]) -> _T:
    """A call on a cluster's node. After a failure of one call the library closes the connections of all nodes, also
    those on which other tasks wait: they find their stream gone, as an AttributeError, which is a lost connection."""
    try:
        return await heeding_cancellation(call)
    except AttributeError as error:
        raise redis.ConnectionError(f"connection closed beside the call: {error}") from error


async def _all_answered(node: ClusterNode, commands: Sequence[Any]) -> None:
    """Runs them on one connection, and raises what the library only notes. Redirections are left to the caller."""
    await node.execute_pipeline(list(commands))
    for command in commands:
        if isinstance(command.result, redis.exceptions.AskError):
            return
        if isinstance(command.result, Exception):
            raise command.result


@dataclass(frozen=True, slots=True)
class PushSource:
    """One connection's worth of channels; ``owned`` clients are closed with the subscription."""

    client: Client
    channels: tuple[str, ...]
    is_sharded: bool


class Connections(Protocol):
    """The clients of one process: one for commands, one for blocking reads."""

    is_cluster: bool

    async def execute(self, *args: Any, key: str, is_blocking: bool = False) -> Any:
        """One command on the node that holds ``key``."""

    async def execute_and_wait(self, *args: Any, key: str, replicas: int, wait_ms: int) -> tuple[Any, int]:
        """A command and WAIT on the same connection (WAIT speaks of its own connection's writes)."""

    async def refresh(self) -> None:
        """Forget connections and addresses that may be dead; what is in use is left alone."""

    async def ping(self) -> None:
        """Every primary answers."""

    async def on_primaries(self, *args: str) -> list[Any]:
        """A command on every primary."""

    async def scan(self, pattern: str) -> list[bytes]:
        """Keys of all primaries that match, in no order."""

    def push_sources(self, channels: Sequence[str]) -> list[PushSource]:
        """How to subscribe to the channels."""

    async def close(self) -> None: ...


def connect(settings: RedisSettings) -> Connections:
    """The clients for the configured address. Nothing is connected yet. Raises `ConfigError`."""
    address = parse_address(settings.redis_url)
    if address.kind == "cluster":
        return ClusterConnections(address, settings)
    return SingleConnections(address, settings)


def _common(settings: RedisSettings, timeout_s: float) -> dict[str, Any]:
    return {
        "protocol": 2,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": settings.redis_connect_timeout_s,
        "driver_info": None,  # else each client looks its own version up on the file system
        "decode_responses": False,
    }


def _single_client(address: Address, settings: RedisSettings, timeout_s: float, connections: int) -> Client:
    options = {**_common(settings, timeout_s), "retry": Retry(NoBackoff(), 0)}
    try:
        if address.kind == "sentinel":
            options |= {"username": address.username, "password": address.password, "db": address.db}
            if address.has_tls:
                options["ssl"] = True
            sentinel: Any = Sentinel(address.hosts, sentinel_kwargs=_common(settings, settings.redis_connect_timeout_s))  # type: ignore[no-untyped-call]
            return sentinel.master_for(address.service, max_connections=connections, **options)
        pool = aredis.BlockingConnectionPool.from_url(
            address.url, max_connections=connections, timeout=settings.redis_timeout_s, **options
        )
    except ValueError as error:
        raise ConfigError(f"redis_url: {error}", param="redis_url") from error
    return aredis.Redis(connection_pool=pool, driver_info=None)


def _sentinels(client: Client) -> list[Client]:
    """The clients with which a client asks for its primary."""
    manager = getattr(client.connection_pool, "sentinel_manager", None)
    return list(manager.sentinels) if manager is not None else []


def _blocking_timeout_s(settings: RedisSettings) -> float:
    return MAX_BLOCK_MS / 1000 + settings.redis_timeout_s


class SingleConnections:
    """A standalone server or the primary that Sentinel names."""

    is_cluster = False

    def __init__(self, address: Address, settings: RedisSettings) -> None:
        limit = settings.redis_max_connections
        self._commands = _single_client(address, settings, settings.redis_timeout_s, limit)
        self._blocking = _single_client(address, settings, _blocking_timeout_s(settings), limit)
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
            for sentinel in _sentinels(client):
                await sentinel.aclose()


class ClusterConnections:
    """A cluster: commands go to the node of their key, push channels are sharded."""

    is_cluster = True

    def __init__(self, address: Address, settings: RedisSettings) -> None:
        self._settings = settings
        self._credentials: dict[str, Any] = {
            "username": address.username,
            "password": address.password,
            "ssl": address.has_tls,
        }
        self._commands = self._client(address, settings.redis_timeout_s)
        self._blocking = self._client(address, _blocking_timeout_s(settings))
        self._places: dict[str, asyncio.Semaphore] = {}  # by node
        self._pushing: dict[str, Client] = {}

    def _client(self, address: Address, timeout_s: float) -> Client:
        return RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in address.hosts],
            max_connections=self._settings.redis_max_connections + _SPARE_CONNECTIONS,
            retry=Retry(NoBackoff(), 0),
            **self._credentials,
            **_common(self._settings, timeout_s),
        )

    @contextlib.asynccontextmanager
    async def _place(self, node: ClusterNode | None) -> AsyncIterator[None]:
        """Waits until a connection to the node is left. The library's cluster client fails the call instead, which
        would count as a lost connection: in a burst of calls everybody would connect anew."""
        name = "" if node is None else node.name
        if name not in self._places:
            self._places[name] = asyncio.Semaphore(self._settings.redis_max_connections)
        places = self._places[name]
        try:
            async with asyncio.timeout(self._settings.redis_timeout_s):
                await places.acquire()
        except TimeoutError as error:
            raise redis.ConnectionError("no connection became free in time") from error
        try:
            yield
        finally:
            places.release()

    async def execute(self, *args: Any, key: str, is_blocking: bool = False) -> Any:
        client = self._blocking if is_blocking else self._commands
        await _on_shared_node(client.initialize())
        # Named here, or the library would ask the server where the keys of XREAD and its like stand.
        node = client.get_node_from_key(key)
        if is_blocking:  # few, and long
            return await _on_shared_node(client.execute_command(*args, target_nodes=node))
        async with self._place(node):
            return await _on_shared_node(client.execute_command(*args, target_nodes=node))

    async def execute_and_wait(self, *args: Any, key: str, replicas: int, wait_ms: int) -> tuple[Any, int]:
        await _on_shared_node(self._commands.initialize())
        node = self._commands.get_node_from_key(key)
        if node is None:
            raise SlotNotCoveredError(f"no node serves {key}")
        commands: list[Any] = [PipelineCommand(0, *args), PipelineCommand(1, "WAIT", replicas, wait_ms)]
        async with self._place(node):
            await _on_shared_node(_all_answered(node, commands))
        for command in commands:
            if isinstance(command.result, redis.exceptions.AskError):
                # MOVED, too. The ordinary way follows it and learns from it; the next round finds the node.
                await self.execute(*args, key=key)
                raise TryAgainError(str(command.result))
        return commands[0].result, int(commands[1].result)

    async def refresh(self) -> None:
        for client in (self._commands, self._blocking):
            if nodes := client.get_nodes():
                for node in nodes:
                    await node.disconnect_free_connections()
                await _on_shared_node(client.nodes_manager.initialize())

    async def ping(self) -> None:
        await _on_shared_node(self._commands.initialize())
        await self.on_primaries("PING")

    async def on_primaries(self, *args: str) -> list[Any]:
        await _on_shared_node(self._commands.initialize())

        async def on(node: ClusterNode) -> Any:
            async with self._place(node):
                return await _on_shared_node(node.execute_command(*args))

        return list(await asyncio.gather(*(on(node) for node in self._commands.get_primaries())))

    async def scan(self, pattern: str) -> list[bytes]:
        await _on_shared_node(self._commands.initialize())
        return [key async for key in self._commands.scan_iter(match=pattern, count=1000)]

    def push_sources(self, channels: Sequence[str]) -> list[PushSource]:
        by_node: dict[str, list[str]] = {}
        for channel in channels:
            node = self._commands.get_node_from_key(channel)
            if node is None:
                raise SlotNotCoveredError(f"no node serves {channel}")
            by_node.setdefault(node.name, []).append(channel)
            if node.name not in self._pushing:
                self._pushing[node.name] = self._node_client(node)
        return [PushSource(self._pushing[name], tuple(group), is_sharded=True) for name, group in by_node.items()]

    def _node_client(self, node: ClusterNode) -> Client:
        return aredis.Redis(
            host=node.host,
            port=int(node.port),
            retry=Retry(NoBackoff(), 0),
            **self._credentials,
            **_common(self._settings, _blocking_timeout_s(self._settings)),
        )

    async def close(self) -> None:
        for client in (self._commands, self._blocking):
            await client.aclose()
            # After a failure the client counts as closed already, and `aclose` leaves its connections alone.
            await client.nodes_manager.aclose()
            await client.nodes_manager.aclose("startup_nodes")
        for client in self._pushing.values():
            await client.aclose()


def connect_sync(settings: RedisSettings, timeout_s: float) -> Client:
    """A synchronous client (it has ``execute_command`` and ``close``), for the one thread that renews a lease."""
    address = parse_address(settings.redis_url)
    options = _common(settings, timeout_s) | {"socket_connect_timeout": timeout_s}
    retry = SyncRetry(NoBackoff(), 0)
    credentials: dict[str, Any] = {"username": address.username, "password": address.password, "ssl": address.has_tls}
    try:
        if address.kind == "cluster":
            nodes = [SyncClusterNode(host, port) for host, port in address.hosts]  # type: ignore[no-untyped-call]
            return SyncRedisCluster(startup_nodes=nodes, retry=retry, **credentials, **options)
        if address.kind == "sentinel":
            sentinel: Any = SyncSentinel(address.hosts, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
            return sentinel.master_for(address.service, db=address.db, retry=retry, **credentials, **options)
        return redis.Redis.from_url(address.url, retry=retry, **options)
    except ValueError as error:
        raise ConfigError(f"redis_url: {error}", param="redis_url") from error
    except TRANSIENT as error:  # a cluster client connects when it is built
        raise translated(error) from error


def close_sync(client: Client) -> None:
    """Close what `connect_sync` made."""
    client.close()
    if not isinstance(client, SyncRedisCluster):
        for sentinel in _sentinels(client):
            sentinel.close()


__all__ = [
    "MAX_BLOCK_MS",
    "TRANSIENT",
    "Connections",
    "NoScriptError",
    "PushSource",
    "RedisError",
    "ResponseError",
    "close_sync",
    "connect",
    "connect_sync",
    "heeding_cancellation",
    "is_missing_group",
    "translated",
]
