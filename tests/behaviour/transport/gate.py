"""Actors that advance one Redis call at a time, in an order that a test decides.

Scripts are atomic, so every interleaving that can happen is one of calls. An actor's connections stop before each
call; the test lets it through, loses the call, loses the reply, or kills the actor there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import redis

from common.transport.connections import Connections


class GatedConnections:
    """Stands before the real connections of one actor."""

    is_cluster = False

    def __init__(self, real: Connections, gate: Gate) -> None:
        self._real = real
        self._gate = gate
        self.refresh, self.ping = real.refresh, real.ping
        self.on_primaries, self.push_sources, self.close = real.on_primaries, real.push_sources, real.close

    async def execute(self, *args: Any, key: str, is_blocking: bool = False) -> Any:
        return await self._gate.pass_through(lambda: self._real.execute(*args, key=key, is_blocking=is_blocking))

    async def execute_and_wait(self, *args: Any, key: str, replicas: int, wait_ms: int) -> tuple[Any, int]:
        raise NotImplementedError


class Gate:
    """One actor's turns. ``verdict``: "run", "drop" (the call is lost) or "lose" (the reply is lost)."""

    def __init__(self) -> None:
        self._waiting: asyncio.Future[str] | None = None
        self._arrived = asyncio.Event()
        self._is_open = False

    async def pass_through(self, call: Callable[[], Awaitable[Any]]) -> Any:
        if self._is_open:
            return await call()
        self._waiting = asyncio.get_running_loop().create_future()
        self._arrived.set()
        verdict = await self._waiting
        if verdict == "drop":
            raise redis.ConnectionError("the call was lost")
        reply = await call()
        if verdict == "lose":
            raise redis.ConnectionError("the reply was lost")
        return reply

    async def wait_for_arrival(self, task: asyncio.Task[None]) -> None:
        """Until the actor stands at the gate, or has ended."""
        arrival = asyncio.create_task(self._arrived.wait())
        await asyncio.wait({arrival, task}, return_when=asyncio.FIRST_COMPLETED)
        arrival.cancel()

    def let_go(self, verdict: str) -> None:
        self._arrived.clear()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(verdict)

    def open(self) -> None:
        """No more stops."""
        self._is_open = True
        self.let_go("run")


class Actor:
    """A task behind a gate, which may be killed there and started anew."""

    def __init__(self, start: Callable[[Gate], Awaitable[None]]) -> None:
        self._start = start
        self.gate = Gate()
        self.task = asyncio.create_task(self._run(self.gate))

    async def _run(self, gate: Gate) -> None:
        await self._start(gate)

    async def step(self, verdict: str) -> None:
        """One call further. Does nothing for an actor that has ended."""
        await self.gate.wait_for_arrival(self.task)
        if not self.task.done():
            self.gate.let_go(verdict)
            await self.gate.wait_for_arrival(self.task)
        if self.task.done() and not self.task.cancelled():
            self.task.result()

    async def kill(self) -> None:
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    async def restart(self) -> None:
        await self.kill()
        self.gate = Gate()
        self.task = asyncio.create_task(self._run(self.gate))
