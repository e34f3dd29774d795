"""Clients of every kind, one request after another, until they are told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

import aiohttp

from tests.faults.answers import Answer
from tests.faults.client import Client, Transcript
from tests.faults.deployment import Deployment
from tests.faults.features import FEATURES, Feature
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


class Traffic:
    """``concurrency`` clients; `transcripts` has what all of them saw."""

    def __init__(self, injector: Injector, rng: Random, *, concurrency: int) -> None:
        self.transcripts: list[Transcript] = []
        self._injector = injector
        self._rng = rng
        self._concurrency = concurrency
        self._num_asked = 0

    async def run_for(self, seconds: float) -> None:
        """Ends when the time is over, every kind of fault had its turn, and every client its last answer."""
        ends_at = asyncio.get_running_loop().time() + seconds
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session, asyncio.TaskGroup() as group:
            for _ in range(self._concurrency):
                group.create_task(self._ask_until(ends_at, session))

    async def _ask_until(self, ends_at: float, session: aiohttp.ClientSession) -> None:
        rng = Random(self._rng.random())
        client = Client(session, self._injector.edges, rng)
        while asyncio.get_running_loop().time() < ends_at or not self._injector.had_every_kind:
            self._num_asked += 1
            feature, key = rng.choice(FEATURES), f"asked-{self._num_asked}"
            self.transcripts.append(await self._ask(client, feature, key, rng))
            await asyncio.sleep(rng.uniform(0, 0.3))

    async def _ask(self, client: Client, feature: Feature, key: str, rng: Random) -> Transcript:
        kind = rng.random()
        if kind < 0.15:
            return await client.leave(feature, rng.randint(300, 20_000))
        if kind < 0.35:
            return await client.document(feature, key)
        hang_up_after = rng.randint(2_000, 60_000) if kind < 0.6 else 0
        return await client.stream(feature, key, hang_up_after=hang_up_after)
