"""A whole deployment on loopback: a log server, edges and workers as the commands an operator starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.transport import LogClient, Reading, RedisSettings, Registry
from tests.faults import tiny_model
from tests.faults.links import Link
from tests.faults.nursery import Child, Nursery
from tests.servers import Server, free_port

ROOT = Path(__file__).parents[2]
START_S = 240.0


class Process:
    """One edge or worker; its output is in ``log``."""

    def __init__(self, name: str, kind: str, port: int, log: Path, popen: subprocess.Popen[bytes] | Child) -> None:
        self.name = name
        self.kind = kind
        self.port = port  # of HTTP for an edge, of the metrics for a worker
        self.log = log
        self._popen = popen

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, also of a frozen one. Safe to repeat."""
        if self.is_running:
            self._popen.kill()
        self._popen.wait()

    async def exit_code(self, within_s: float = 120.0) -> int:
        return await asyncio.to_thread(self._popen.wait, within_s)

    async def is_ready(self) -> bool:
        assert self.is_running, f"{self.name} ended: {self.log.read_text()[-3000:]}"
        return await asyncio.to_thread(_answers, f"{self.url}/ready")

    def metric(self, name: str) -> float:
        """Sum over all label sets of one metric."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


class Deployment:
    """Start with `open`; `close` ends every process. ``edges`` and ``workers`` are those that were not removed."""

    def __init__(
        self,
        directory: Path,
        *,
        fsync: str,
        worker: dict[str, object],
        edge: dict[str, object],
        worker_module: str,
        nursery: Nursery | None,
        server: Any = None,
        has_links: bool = False,
    ) -> None:
        self.directory = directory
        self.server = server or Server(fsync=fsync)
        self.links: dict[str, Link] = {}
        self.edges: list[Process] = []
        self.workers: list[Process] = []
        self.client: LogClient
        self.reading: Reading
        self.registry: Registry
        self._settings = {"worker": worker, "edge": edge}
        self._commands = {"edge": ("cli", "edge"), "worker": (worker_module,) if worker_module else ("cli", "worker")}
        self._started = {"worker": 0, "edge": 0}
        self._every: list[Process] = []
        self._nursery = nursery
        self._has_links = has_links

    @classmethod
    async def open(
        cls,
        directory: Path,
        *,
        edges: int = 2,
        workers: int = 2,
        fsync: str = "everysec",
        worker: dict[str, object] | None = None,
        edge: dict[str, object] | None = None,
        worker_module: str = "",
        nursery: Nursery | None = None,
        server: Any = None,
        has_links: bool = False,
    ) -> Deployment:
        """``worker`` and ``edge``: settings beside the usual ones, by field name. ``worker_module``: what is run
        instead of ``headrace worker``. ``nursery``: forks the processes, instead of starting each afresh.
        ``server``: a `Server`, `Watched` or `Cluster` that is not started yet. ``has_links``: every process has a way
        to the log of its own (`links`, by name of the process) that can be hurt; of a single server only."""
        made = cls(
            directory,
            fsync=fsync,
            worker=worker or {},
            edge=edge or {},
            worker_module=worker_module,
            nursery=nursery,
            server=server,
            has_links=has_links,
        )
        try:
            tiny_model.write_tiny_model(directory / tiny_model.NAME)
            made.server.start()
            settings = RedisSettings(redis_url=made.server.url, partitions=4, redis_retry_s=20.0)
            made.client = await LogClient.open(settings)
            made.reading, made.registry = Reading(made.client), Registry(made.client)
            started = [made.start_worker() for _ in range(workers)] + [made.start_edge() for _ in range(edges)]
            await asyncio.gather(*(made.ready(process) for process in started))
        except BaseException:
            await made.close()
            raise
        return made

    def start_worker(self) -> Process:
        """One more worker, under a name of its own; it serves once it has loaded its model."""
        usual = {
            "model": self.directory / tiny_model.NAME,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 32,
            "kv_cache_memory_bytes": 32 << 20,
            "num_threads": 1,
            "stats_interval_s": 0.2,
            "worker_drain_timeout_s": 3.0,
        }
        return self._start("worker", self.workers, "metrics_port", {**usual, **self._settings["worker"]})

    def start_edge(self) -> Process:
        usual = {
            "host": "127.0.0.1",
            "catalog_refresh_s": 0.2,
            "accept_without_worker": True,
            "max_queued_requests": 10_000,
            "drain_notice_s": 0.0,
            "drain_timeout_s": 1.0,
        }
        return self._start("edge", self.edges, "port", {**usual, **self._settings["edge"]})

    async def ready(self, process: Process) -> Process:
        await self.until(process.is_ready, START_S)
        return process

    def worker(self, name: str) -> Process:
        """By name, also one that was removed."""
        return next(process for process in self._every if process.name == name)

    def remove(self, process: Process) -> None:
        """It is not one of those that work any more."""
        with contextlib.suppress(ValueError):
            (self.edges if process.kind == "edge" else self.workers).remove(process)

    async def close(self) -> None:
        for process in self._every:
            process.kill()
        await asyncio.gather(*(link.close() for link in self.links.values()))
        if hasattr(self, "client"):
            await self.client.close()
        self.server.stop()

    async def until(self, condition: Callable[[], object], within_s: float = 120.0, pause_s: float = 0.02) -> None:
        """Wait for what other processes bring about. ``condition`` may be a coroutine function."""
        deadline = time.monotonic() + within_s
        while True:
            holds = condition()
            if asyncio.iscoroutine(holds):
                holds = await holds
            if holds:
                return
            assert time.monotonic() < deadline, f"did not come true within {within_s:.0f} s: {condition}"
            await asyncio.sleep(pause_s)

    def _start(self, kind: str, among: list[Process], port_field: str, settings: dict[str, object]) -> Process:
        self._started[kind] += 1
        name, port = f"{kind}-{self._started[kind]}", free_port()
        given = {
            "redis_url": self._way_to_the_log(name),
            "partitions": 4,
            "log_format": "json",
            port_field: port,
            **({"worker_name": name} if kind == "worker" else {}),
            **settings,
        }
        environ = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        environ |= {f"HEADRACE_{field.upper()}": str(value) for field, value in given.items()}
        log = self.directory / f"{name}.log"
        process = Process(name, kind, port, log, self._run(self._commands[kind], environ, log))
        among.append(process)
        self._every.append(process)
        return process

    def _way_to_the_log(self, name: str) -> str:
        if not self._has_links:
            return str(self.server.url)
        self.links[name] = Link(self.server.port)
        return f"redis://127.0.0.1:{self.links[name].port}/0"

    def _run(self, words: tuple[str, ...], environ: dict[str, str], log: Path) -> subprocess.Popen[bytes] | Child:
        if self._nursery is not None:
            return self._nursery.fork(list(words[1:]), environ, log)
        with log.open("ab") as file:
            return subprocess.Popen([sys.executable, "-m", *words], env=environ, cwd=ROOT, stdout=file, stderr=file)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False
