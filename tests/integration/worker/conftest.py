"""Real worker processes around a deterministic model, on a real server."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from common.events import EngineRequest, Recorded
from common.request_state import RequestState, fold
from common.transport import AdmissionLimits, LogClient, Reading, RedisSettings, Registry, Submission, new_request_id
from tests.servers import Server, running
from tests.unit.engine_worker.text_world import Inside, request

PLENTY = AdmissionLimits(max_requests=10_000, max_tokens=100_000_000)
ROOT = Path(__file__).parents[3]
LEASE_S = 2.0  # a busy machine keeps a worker from renewing for a while, too


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running(Server(fsync="everysec")) as started:
        yield started


class Fleet:
    """Workers by name, and the edge's side of the log."""

    def __init__(self, client: LogClient, settings: RedisSettings, directory: Path) -> None:
        self.client = client
        self.registry = Registry(client)
        self.submission = Submission(client)
        self.reading = Reading(client)
        self._settings = settings
        self._directory = directory
        self.module = "tests.integration.worker.fake_worker"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}

    async def start(self, name: str, *, step_s: float = 0.01, flags: tuple[str, ...] = (), **more: object) -> None:
        """A worker process, once it is registered and live."""
        self.spawn(name, step_s=step_s, flags=flags, **more)
        await self.until(lambda: self.is_live(name), 100)

    def spawn(self, name: str, *, step_s: float = 0.01, flags: tuple[str, ...] = (), **more: object) -> None:
        """A worker process that begins."""
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HEADRACE_REDIS_URL": self._settings.redis_url,
            "HEADRACE_KEY_PREFIX": self._settings.key_prefix,
            "HEADRACE_PARTITIONS": "2",
            "HEADRACE_WORKER_NAME": name,
            "HEADRACE_LEASE_TTL_S": str(LEASE_S),
            "HEADRACE_STATS_INTERVAL_S": "0.1",
            "FAKE_STEP_S": str(step_s),
            **{f"{_prefix(key)}{key.upper()}": str(value) for key, value in more.items()},
        }
        with (self._directory / f"{name}.log").open("ab") as log:
            self.workers[name] = _spawn([sys.executable, "-m", self.module, *flags], environ, self._directory, log)

    async def is_live(self, name: str) -> bool:
        if self.workers[name].poll() is not None:
            raise AssertionError(f"{name} ended: {self.log_of(name)[-3000:]}")
        return any(record.worker == name and record.is_live for record in await self.registry.workers())

    def log_of(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()

    def signal(self, name: str, number: signal.Signals) -> None:
        self.workers[name].send_signal(number)

    async def exit_code(self, name: str, timeout_s: float = 120.0) -> int:
        return await asyncio.to_thread(self.workers[name].wait, timeout_s)

    def kill_all(self) -> None:
        for process in self.workers.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()

    async def submit(self, seed: int = 1, **parameters: object) -> EngineRequest:
        """A request whose prompt depends on ``seed``."""
        return await self.submit_as_is(
            request(new_request_id(self.client.keys.partitions), prompt=(seed, 7, 9), **parameters)
        )

    async def submit_as_is(self, made: EngineRequest) -> EngineRequest:
        await self.submission.submit(made, body_fingerprint="f", limits=PLENTY, edge_id="e", grace_s=600.0)
        return made

    async def events(self, made: EngineRequest) -> list[Recorded]:
        """Everything to the end of a request."""
        async with asyncio.timeout(200):
            return [item async for item in self.reading.follow(made.request_id, poll_s=0.02)]

    async def until_length(self, made: EngineRequest, length: int) -> None:
        """Wait until the request's log has so many events."""

        async def is_long() -> bool:
            return len(await self.reading.read_range(made.request_id, after=0)) >= length

        await self.until(is_long)

    async def until(self, condition, timeout_s: float = 120.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not await condition():  # noqa: ASYNC110 - what is waited for is in other processes
                await asyncio.sleep(0.02)


@pytest.fixture
async def fleet(server: Server, tmp_path: Path) -> AsyncIterator[Fleet]:
    settings = RedisSettings(redis_url=server.url, key_prefix=f"{secrets.token_hex(4)}:", partitions=2)
    client = await LogClient.open(settings)
    made = Fleet(client, settings, tmp_path)
    try:
        yield made
    finally:
        made.kill_all()
        await client.close()


def _prefix(key: str) -> str:
    return "" if key.startswith("fake_") else "HEADRACE_"


def _spawn(command: list[str], environ: dict[str, str], cwd: Path, log: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=environ, cwd=cwd, stderr=log, stdout=log)


async def undisturbed(made: EngineRequest) -> RequestState:
    """What the request's choices become when nothing ever goes wrong."""
    inside = Inside()
    inside.own(made)
    await inside.run()
    stream = inside.log.streams[made.request_id]
    return fold([Recorded(n, event) for n, event in enumerate(stream, start=1)])


async def assert_exact(made: EngineRequest, events: list[Recorded]) -> RequestState:
    """``events`` are gapless, legal, and say token for token what an undisturbed run says."""
    assert [item.n for item in events] == list(range(1, len(events) + 1))
    state, expected = fold(events), await undisturbed(made)
    assert state.choices.keys() == expected.choices.keys()
    for index, choice in expected.choices.items():
        found = state.choice(index)
        assert (found.token_ids, found.text, found.finish_reason, found.stop_reason) == (
            choice.token_ids,
            choice.text,
            choice.finish_reason,
            choice.stop_reason,
        )
    assert state.usage is not None
    assert expected.usage is not None
    assert state.usage.completion_tokens == expected.usage.completion_tokens
    return state
