"""The connection to the log: opening, checking, calling, and coming back after a failure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from common.config_fields import redacted
from common.errors import ConfigError, LogCorrupt, LogUnavailable
from common.transport import deployment
from common.transport.connecting import connect
from common.transport.connections import Connections
from common.transport.failures import TRANSIENT, NoScriptError, RedisError, ResponseError, is_missing_group, translated
from common.transport.keys import Keys
from common.transport.leases import Lease
from common.transport.scripts import Script
from common.transport.settings import RedisSettings

__all__ = ["GroupMissing", "LogClient", "RedisSettings"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.5


class GroupMissing(LogCorrupt):
    """A consumer group is gone; whoever reads with it creates it again. Does not leave this package."""


class LogClient:
    """One process's connections to the log. Everything else in this package is built on it; `close` it at the end.

    Belongs to one event loop. redis types stay inside this package: failures come out as `LogUnavailable`,
    `LogCorrupt` or `ConfigError`. Scripts and pushes share one connection. Any other call that is cancelled closes its
    connection, so such calls belong into long-lived tasks.
    """

    def __init__(self, settings: RedisSettings, connections: Connections, keys: Keys) -> None:
        """Use `open`."""
        self.settings = settings
        self.keys = keys
        self.connections = connections
        self._was_connected = False
        self.generation = 0
        """Counts reconnections: when it has changed, replies may have been lost."""
        self._reconnecting = asyncio.Lock()

    @classmethod
    async def open(cls, settings: RedisSettings) -> LogClient:
        """Connect and check the deployment.

        Raises `LogUnavailable`, and `ConfigError` for a malformed URL, a server that is too old, another partition
        count than the deployment's, an eviction policy that would drop requests, or strict durability that the server
        does not give.
        """
        connections = connect(settings)
        client = cls(settings, connections, Keys(settings.key_prefix, settings.partitions or 1))
        try:
            await client.retrying(connections.ping)
            client._was_connected = True
            await client.retrying(lambda: deployment.check_server(connections, settings))
            partitions = await client.retrying(lambda: deployment.agree_partitions(connections, client.keys, settings))
        except BaseException:
            await connections.close()
            raise
        client.keys = Keys(settings.key_prefix, partitions)
        return client

    async def close(self) -> None:
        """Close all connections. No call may be in flight."""
        await self.connections.close()

    @property
    def waits_for_replicas(self) -> bool:
        """What is written counts only once replicas have it."""
        return self.settings.durability == "strict" and self.settings.strict_replicas > 0

    async def ping(self) -> float:
        """Round trip in seconds, without retries. Raises `LogUnavailable`."""
        start = time.monotonic()
        try:
            await self.connections.ping()
        except (*TRANSIENT, RedisError) as error:
            raise translated(error) from error
        return time.monotonic() - start

    def lease(self, worker: str, ttl_s: float = 3.0) -> Lease:
        """A new incarnation's lease with connections of its own, for use from one other thread."""
        return Lease(self.settings, self.keys, worker, ttl_s)

    async def run(self, script: Script, keys: Sequence[str], args: Sequence[Any], *, is_durable: bool = False) -> Any:
        """Call a repeatable script, again after a reconnection if need be.

        With ``is_durable`` the reply comes only when the configured replicas have what was written before it.
        """

        async def call() -> Any:
            return await self._evaluate(script, keys, args, is_durable=is_durable)

        return await self.retrying(call)

    async def run_once(self, script: Script, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Call a script that must not be repeated. After a lost connection it comes back up, then raises."""
        return await self._once(lambda: self._evaluate(script, keys, args, is_durable=False))

    async def command(self, *args: Any, key: str) -> Any:
        """A repeatable command on the node of ``key``."""
        return await self.retrying(lambda: self.connections.execute(*args, key=key))

    async def blocking(self, *args: Any, key: str) -> Any:
        """A blocking command, not repeated."""
        return await self._once(lambda: self.connections.execute(*args, key=key, is_blocking=True))

    async def retrying(self, operation: Callable[[], Awaitable[_T]]) -> _T:
        """The operation, tried again over reconnections for ``redis_retry_s``."""
        deadline = time.monotonic() + self.settings.redis_retry_s
        while True:
            generation = self.generation
            try:
                return await operation()
            except TRANSIENT as error:
                if time.monotonic() >= deadline:
                    raise translated(error) from error
                await self._recover(generation, deadline, error)
            except RedisError as error:
                raise _answered(error) from error

    async def reconnected(self, generation: int, cause: Exception) -> None:
        """For connections that live outside of `run` and `command`: wait until the log answers again.

        Returns at once when somebody has reconnected since ``generation``. Raises `LogUnavailable`.
        """
        await self._recover(generation, time.monotonic() + self.settings.redis_retry_s, cause)

    async def _once(self, operation: Callable[[], Awaitable[_T]]) -> _T:
        generation = self.generation
        try:
            return await operation()
        except TRANSIENT as error:
            await self._recover(generation, time.monotonic() + self.settings.redis_retry_s, error)
            raise translated(error) from error
        except RedisError as error:
            raise _answered(error) from error

    async def _evaluate(self, script: Script, keys: Sequence[str], args: Sequence[Any], *, is_durable: bool) -> Any:
        tail = (len(keys), *keys, *args)
        try:
            return await self._send("EVALSHA", script.sha, *tail, key=keys[0], is_durable=is_durable)
        except NoScriptError:  # a restart or a failover empties the script cache; EVAL fills it
            return await self._send("EVAL", script.text, *tail, key=keys[0], is_durable=is_durable)

    async def _send(self, *args: Any, key: str, is_durable: bool) -> Any:
        if not (is_durable and self.waits_for_replicas):
            return await self.connections.execute(*args, key=key)
        replicas, wait_ms = self.settings.strict_replicas, self.settings.strict_wait_ms
        reply, acknowledged = await self.connections.execute_and_wait(
            *args, key=key, replicas=replicas, wait_ms=wait_ms
        )
        if acknowledged < replicas:
            raise LogUnavailable(f"{acknowledged} of {replicas} replicas acknowledged within {wait_ms} ms")
        return reply

    async def _recover(self, generation: int, deadline: float, cause: Exception) -> None:
        """Come back up, one task for all: the others wait for it and go on with what it found."""
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + max(deadline - time.monotonic(), 0)):
                async with self._reconnecting:
                    if self.generation == generation:
                        await self._reconnect(cause)
        except TimeoutError:
            error = translated(cause)
            if not isinstance(error, LogUnavailable):  # a lost subscription, say, which has no error of the library's
                error = LogUnavailable(f"the log cannot be reached: {type(cause).__name__}: {cause}")
            raise error from cause

    async def _reconnect(self, cause: Exception) -> None:
        if self._was_connected:
            _log.warning("connection to the log lost: %s: %s", type(cause).__name__, cause)
        else:
            url = redacted(self.settings.redis_url)
            _log.warning("no log at %s yet (redis_url: --redis-url or HEADRACE_REDIS_URL): %s", url, cause)
        pause_s = _FIRST_PAUSE_S
        while True:
            with contextlib.suppress(*TRANSIENT):
                await self.connections.refresh()
                await self.connections.ping()
                self.generation += 1
                _log.info("connected to the log again")
                return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)


def _answered(error: RedisError) -> ConfigError | LogUnavailable | LogCorrupt:
    if isinstance(error, ResponseError) and is_missing_group(error):
        return GroupMissing(str(error))
    ours = translated(error)
    assert isinstance(ours, LogUnavailable | LogCorrupt)
    return ours
