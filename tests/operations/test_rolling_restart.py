"""Every process of a deployment is replaced, one after the other, while clients ask: nobody notices.

The clients repeat nothing: one connection a request, no id, no retry. They ask an edge whose readiness probe said yes
at the last look, as a balancer does.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from random import Random

import aiohttp
import pytest

from tests.faults.answers import Answer, answer_of_document, answer_of_stream, blocks_of
from tests.faults.deployment import Deployment, Process
from tests.faults.features import FEATURES, Feature
from tests.faults.traffic import undisturbed
from tests.operations.conftest import Operate, session

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
CLIENTS = 6
LOOK_S = 0.25
ASKED = [f for f in FEATURES if f.name in ("greedy", "sampled", "chat", "logprobs", "json_schema", "stop")]


class Balanced:
    """Clients behind a balancer; ``outcomes`` counts what they got."""

    def __init__(self, deployment: Deployment, expected: dict[str, Answer]) -> None:
        self.outcomes: Counter[str] = Counter()
        self._deployment = deployment
        self._expected = expected
        self._ready: list[Process] = list(deployment.edges)
        self._is_over = False

    def stop(self) -> None:
        self._is_over = True

    async def look_forever(self) -> None:
        while not self._is_over:
            looks = [(edge, edge.is_running and await edge.is_ready()) for edge in list(self._deployment.edges)]
            self._ready = [edge for edge, is_ready in looks if is_ready]
            await asyncio.sleep(LOOK_S)

    async def ask_forever(self, seed: int, http: aiohttp.ClientSession) -> None:
        rng = Random(seed)
        while not self._is_over:
            feature, is_stream = rng.choice(ASKED), rng.random() < 0.7
            try:
                outcome = await self._ask(feature, rng.choice(self._ready).url, http, is_stream=is_stream)
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                outcome = repr(error)
            self.outcomes[outcome] += 1

    async def _ask(self, feature: Feature, url: str, http: aiohttp.ClientSession, *, is_stream: bool) -> str:
        async with http.post(url + feature.path, json=feature.body(stream=is_stream)) as response:
            raw = await response.read()
        if response.status != 200:
            return f"{response.status} {raw[:200]!r}"
        answer = answer_of_stream(blocks_of(raw)) if is_stream else answer_of_document(json.loads(raw))
        return "right" if answer == self._expected[feature.name] else f"wrong: {feature.name} {answer.error}"


async def replace(deployment: Deployment, old: Process, new: Process) -> None:
    """The new one serves before the old one is asked to stop; the old one ends in order."""
    await deployment.ready(new)
    await asyncio.sleep(2 * LOOK_S)
    old.signal(signal.SIGTERM)
    assert await old.exit_code(60) == 0, old.log.read_text()[-3000:]
    deployment.remove(old)


@pytest.mark.parametrize("on_stop", ["drain", "handover"])
async def test_a_rolling_restart_of_every_process_under_load_fails_nobody(operate: Operate, on_stop: str) -> None:
    deployment = await operate(
        worker={"worker_drain_timeout_s": 30.0, "handover": on_stop == "handover"},
        edge={"drain_notice_s": 2.0, "drain_timeout_s": 40.0},
    )
    balanced = Balanced(deployment, await undisturbed(deployment, ASKED))
    async with session() as http, asyncio.TaskGroup() as group:
        group.create_task(balanced.look_forever())
        for seed in range(CLIENTS):
            group.create_task(balanced.ask_forever(seed, http))
        for old in list(deployment.edges):
            await replace(deployment, old, deployment.start_edge())
        for old in list(deployment.workers):
            await replace(deployment, old, deployment.start_worker())
        balanced.stop()
    assert list(balanced.outcomes) == ["right"], balanced.outcomes
    assert balanced.outcomes["right"] >= 2 * CLIENTS
    print(f"{on_stop}: {balanced.outcomes['right']} requests, all right, over 4 replaced processes")
