"""Faults on a seeded schedule. Another process of the kind always works, so that what is measured is the failover."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from tests.faults.deployment import START_S, Deployment, Process
from tests.servers import Cluster

PROCESSES = {
    "worker killed": 5,
    "worker frozen": 3,
    "worker stopped": 2,
    "edge killed": 3,
    "edge frozen": 1,
    "edge stopped": 2,
}
LINKS = {f"{kind} link {hurt}": 1 for kind in ("worker", "edge") for hurt in ("cut", "stalled", "slow", "torn")}
SERVERS = {
    "single": {"server killed": 2, "server frozen": 1},
    "sentinel": {"primary killed": 4, "primary frozen": 2},
    "cluster": {"primary killed": 4, "primary frozen": 2},
}
_AT_ONCE = 4  # faults that may be under way together
_SLOW_S = 0.15


def kinds(layout: str, *, has_links: bool) -> dict[str, int]:
    """What may happen to a deployment, with weights."""
    return PROCESSES | (LINKS if has_links else {}) | SERVERS[layout]


@dataclass(frozen=True)
class Fault:
    """What happened to whom, and when (monotonic seconds)."""

    kind: str
    name: str
    at: float


class Injector:
    """Hurts one process after another; start `run` as a task; it ends after `stop`."""

    def __init__(
        self, deployment: Deployment, rng: Random, kinds: dict[str, int], *, every_s: float, lease_s: float
    ) -> None:
        self.faults: list[Fault] = []
        self._kinds = kinds
        self._deployment = deployment
        self._rng = rng
        self._every_s = every_s
        self._lease_s = lease_s
        self._ready: set[str] = {process.name for process in (*deployment.workers, *deployment.edges)}
        self._tasks: asyncio.TaskGroup
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._server = asyncio.Lock()
        self._is_over = asyncio.Event()
        self._actions: dict[str, Callable[[], Awaitable[None]]] = {
            "worker killed": lambda: self._kill(self._deployment.workers),
            "worker frozen": lambda: self._freeze(self._deployment.workers),
            "worker stopped": lambda: self._stop(self._deployment.workers),
            "edge killed": lambda: self._kill(self._deployment.edges),
            "edge frozen": lambda: self._freeze(self._deployment.edges),
            "edge stopped": lambda: self._stop(self._deployment.edges),
            "server killed": self._kill_server,
            "server frozen": self._freeze_server,
            "primary killed": lambda: self._fail_over(frozen=False),
            "primary frozen": lambda: self._fail_over(frozen=True),
            **{kind: partial(self._hurt_link, kind) for kind in LINKS},
        }

    @property
    def counts(self) -> Counter[str]:
        return Counter(fault.kind for fault in self.faults)

    @property
    def had_every_kind(self) -> bool:
        return set(self.counts) == set(self._kinds)

    def edges(self) -> list[Process]:
        """Those a balancer would send clients to; some may have died a moment ago."""
        return [edge for edge in self._deployment.edges if edge.name in self._ready]

    async def run(self) -> None:
        """Each kind once in random order, then by weight, until `stop`; then everything is ready that was started.

        A fault does not wait until the one before it is over: a server dies while a worker is frozen.
        """
        async with asyncio.TaskGroup() as self._tasks:
            await self._hurt()

    def stop(self) -> None:
        """No more faults."""
        self._is_over.set()

    async def _hurt(self) -> None:
        every, weights = list(self._kinds), list(self._kinds.values())
        first = self._rng.sample(every, len(every))
        while not self._is_over.is_set():
            kind = first.pop() if first else self._rng.choices(every, weights)[0]
            await self._places.acquire()
            self._tasks.create_task(self._act(kind))
            pause = self._rng.uniform(0.4, 1.6) * self._every_s
            try:
                await asyncio.wait_for(self._is_over.wait(), pause)
            except TimeoutError:
                continue

    async def _act(self, kind: str) -> None:
        try:
            await self._actions[kind]()
        finally:
            self._places.release()

    async def _victim(self, among: list[Process]) -> Process:
        """One that is ready, as soon as another one is, too; it does not count as ready any more."""

        def ready() -> list[Process]:
            return [process for process in among if process.name in self._ready]

        await self._deployment.until(lambda: len(ready()) > 1, START_S)
        victim = self._rng.choice(ready())
        self._ready.discard(victim.name)
        return victim

    def _note(self, kind: str, name: str) -> None:
        self.faults.append(Fault(kind, name, time.monotonic()))

    async def _kill(self, among: list[Process]) -> None:
        victim = await self._victim(among)
        self._note(f"{victim.kind} killed", victim.name)
        await asyncio.to_thread(victim.kill)
        self._deployment.remove(victim)
        await self._until_ready(self._start(victim.kind))

    async def _freeze(self, among: list[Process]) -> None:
        """Longer than a lease, then it goes on as if nothing had been."""
        victim = await self._victim(among)
        self._note(f"{victim.kind} frozen", victim.name)
        victim.signal(signal.SIGSTOP)
        await asyncio.sleep(self._lease_s * self._rng.uniform(1.8, 3.0))
        victim.signal(signal.SIGCONT)
        self._ready.add(victim.name)

    async def _stop(self, among: list[Process]) -> None:
        """As a rolling restart: the new one is ready before the old one is told to end."""
        await self._until_ready(self._start(among[0].kind))
        victim = await self._victim(among)
        self._note(f"{victim.kind} stopped", victim.name)
        victim.signal(signal.SIGTERM)
        self._deployment.remove(victim)
        code = await victim.exit_code()
        assert code == 0, f"{victim.name} stopped with {code}: {victim.log.read_text()[-2000:]}"

    async def _kill_server(self) -> None:
        async with self._server:
            self._note("server killed", "server")
            self._deployment.server.kill()
            await asyncio.sleep(self._rng.uniform(0.1, 1.5))
            await asyncio.to_thread(self._deployment.server.start)

    async def _freeze_server(self) -> None:
        """Connections stay, answers do not come, and all leases run out meanwhile."""
        async with self._server:
            self._note("server frozen", "server")
            self._deployment.server.pause()
            await asyncio.sleep(self._lease_s * self._rng.uniform(0.5, 2.5))
            self._deployment.server.resume()

    async def _fail_over(self, *, frozen: bool) -> None:
        """Another server becomes the primary, and the old one comes back as its replica."""
        async with self._server:
            self._note(f"primary {'frozen' if frozen else 'killed'}", "server")
            server = self._deployment.server
            if isinstance(server, Cluster):
                await asyncio.to_thread(server.fail_over, self._rng.randrange(3), frozen=frozen)
            else:
                await asyncio.to_thread(server.fail_over, frozen=frozen)

    async def _hurt_link(self, kind: str) -> None:
        """The process lives on, and cannot reach the log, or badly: shorter and longer than a lease."""
        whose, _, hurt = kind.split()
        victim = await self._victim(self._deployment.workers if whose == "worker" else self._deployment.edges)
        link = self._deployment.links[victim.name]
        self._note(kind, victim.name)
        match hurt:
            case "cut":
                link.cut()
            case "stalled":
                link.stall()
            case "slow":
                link.slow(_SLOW_S)
            case "torn":
                link.tear()
        await asyncio.sleep(self._lease_s * self._rng.uniform(0.3, 3.0))
        link.mend()
        self._ready.add(victim.name)

    def _start(self, kind: str) -> Process:
        return self._deployment.start_edge() if kind == "edge" else self._deployment.start_worker()

    async def _until_ready(self, process: Process) -> None:
        await self._deployment.ready(process)
        self._ready.add(process.name)
