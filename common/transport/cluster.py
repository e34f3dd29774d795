"""A cluster: commands go to the node of their key, push channels are sharded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any, Final, TypeVar

import redis
from redis import asyncio as aredis
from redis.asyncio.cluster import ClusterNode, PipelineCommand, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from common.transport.addresses import Address
from common.transport.connections import Client, PushSource, blocking_timeout_s, common_options
from common.transport.failures import SlotNotCoveredError, TryAgainError, heeding_cancellation
from common.transport.settings import RedisSettings

_T = TypeVar("_T")

_SPARE_CONNECTIONS: Final = 4  # to a node: for redirected calls, and for the library's questions about the cluster


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
        self._blocking = self._client(address, blocking_timeout_s(settings))
        self._places: dict[str, asyncio.Semaphore] = {}  # by node
        self._pushing: dict[str, Client] = {}

    def _client(self, address: Address, timeout_s: float) -> Client:
        return RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in address.hosts],
            max_connections=self._settings.redis_max_connections + _SPARE_CONNECTIONS,
            retry=Retry(NoBackoff(), 0),
            **self._credentials,
            **common_options(self._settings, timeout_s),
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
            **common_options(self._settings, blocking_timeout_s(self._settings)),
        )

    async def close(self) -> None:
        for client in (self._commands, self._blocking):
            await client.aclose()
            # After a failure the client counts as closed already, and `aclose` leaves its connections alone.
            await client.nodes_manager.aclose()
            await client.nodes_manager.aclose("startup_nodes")
        for client in self._pushing.values():
            await client.aclose()
