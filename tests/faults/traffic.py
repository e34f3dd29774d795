"""Clients of every kind, one request after another, until they are told to stop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import aiohttp

from tests.faults.answers import Answer
from tests.faults.client import Client, Transcript
from tests.faults.deployment import Deployment
from tests.faults.features import FEATURES, SHORT_FEATURES, Feature
from tests.faults.injector import Injector


async def undisturbed(deployment: Deployment, features: Sequence[Feature] = FEATURES) -> dict[str, Answer]:
    """The answer of each feature, asked alone and in one piece."""
    answers = {}
    async with aiohttp.ClientSession() as session:
        client = Client(session, lambda: deployment.edges[:1], Random(0))
        for feature in features:
            transcript = await client.document(feature, f"alone-{feature.name}")
            answers[feature.name] = transcript.answer()
            assert answers[feature.name].is_whole, (feature.name, transcript.refusals, answers[feature.name])
    return answers


@dataclass(frozen=True)
class Goal:
    """When traffic may end: when all of it is reached, and every kind of fault had its turn."""

    seconds: float
    requests: int = 0
    faults: int = 0


class Traffic:
    """``concurrency`` clients; `transcripts` has what all of them saw. ``is_short``: most ask for
    short answers, one in twenty for a full one."""

    def __init__(self, injector: Injector, rng: Random, *, concurrency: int, is_short: bool = False) -> None:
        self.transcripts: list[Transcript] = []
        self._injector = injector
        self._rng = rng
        self._concurrency = concurrency
        self._is_short = is_short
        self._scale = 8 if is_short else 1
        self._num_asked = 0
        self._goal = Goal(0)
        self._ends_at = 0.0

    async def run_until(self, goal: Goal) -> None:
        """Ends when the goal is reached and every client has its last answer."""
        self._goal, self._ends_at = goal, time.monotonic() + goal.seconds
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                group.create_task(self._ask_forever(session))

    @property
    def _is_done(self) -> bool:
        return (
            time.monotonic() >= self._ends_at
            and self._num_asked >= self._goal.requests
            and len(self._injector.faults) >= self._goal.faults
            and self._injector.had_every_kind
        )

    async def _ask_forever(self, session: aiohttp.ClientSession) -> None:
        rng = Random(self._rng.random())
        client = Client(session, self._injector.edges, rng)
        while not self._is_done:
            self._num_asked += 1
            is_short = self._is_short and rng.random() < 0.95
            feature, key = rng.choice(SHORT_FEATURES if is_short else FEATURES), f"asked-{self._num_asked}"
            self.transcripts.append(await self._ask(client, feature, key, rng))
            await asyncio.sleep(rng.uniform(0, 0.3 / self._scale))

    async def _ask(self, client: Client, feature: Feature, key: str, rng: Random) -> Transcript:
        kind = rng.random()
        if kind < 0.15:
            return await client.leave(feature, rng.randint(300, 20_000 // self._scale))
        if kind < 0.35:
            return await client.document(feature, key)
        hang_up_after = rng.randint(2_000, 60_000 // self._scale) if kind < 0.6 else 0
        return await client.stream(feature, key, hang_up_after=hang_up_after)
