"""Each fault at the moment where it hurts most, one test a moment; the answers are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from random import Random

import aiohttp
import pytest

from common.events import Milestone, Recorded, Started, Tokens
from tests.faults.audit import audit, history
from tests.faults.client import Client, Transcript
from tests.faults.conftest import Deploy
from tests.faults.deployment import Deployment, Process
from tests.faults.features import Feature, feature
from tests.faults.traffic import undisturbed

pytestmark = [pytest.mark.e2e]
# Steps of 16 tokens: a prompt of 7,000 takes hundreds of them.
SMALL_STEPS = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
LONG_PROMPT = Feature("long_prompt", fields={"temperature": 0, "max_tokens": 50}, prompt="a cat on the mat, " * 400)
LONG = Feature("long", fields={"temperature": 1.0, "max_tokens": 4000, "seed": 5})
EMOJI = Feature("emoji", fields={"structured_outputs": {"regex": "🦊{400}"}, "max_tokens": 2000})
_STOP_STRING = "🦊é" * 40
STOP = Feature(
    "stop",
    fields={"structured_outputs": {"regex": "(ab){300}(🦊é){40}"}, "stop": [_STOP_STRING], "max_tokens": 2000},
)
Moment = Callable[[list[Recorded]], bool]


def tokens_of(events: list[Recorded]) -> list[int]:
    return [token for item in events if isinstance(item.event, Tokens) for token in item.event.token_ids]


def mid_prefill(events: list[Recorded]) -> bool:
    chunks = [e for e in events if isinstance(e.event, Milestone) and e.event.what == "prefill_chunk"]
    return len(chunks) >= 5 and not tokens_of(events)


def mid_decode(events: list[Recorded]) -> bool:
    return len(tokens_of(events)) >= 100


def mid_character(events: list[Recorded]) -> bool:
    """The log ends with some of a character's bytes: their text is not in it."""
    tokens = tokens_of(events)
    return len(tokens) > 100 and len(tokens) % 4 in (1, 2, 3)


def mid_stop_string(events: list[Recorded]) -> bool:
    """The log ends within the stop string: its beginning was held back."""
    return 600 < len(tokens_of(events)) < 600 + len(_STOP_STRING.encode())


class Scene:
    """Clients of one deployment, and who owns what."""

    def __init__(self, deployment: Deployment, session: aiohttp.ClientSession) -> None:
        self.deployment = deployment
        self.transcripts: list[Transcript] = []
        self._client = Client(session, lambda: deployment.edges, Random(1))
        self._tasks: list[asyncio.Task[Transcript]] = []

    def ask(self, feature: Feature) -> Transcript:
        """Begin to read; the transcript fills up meanwhile."""
        transcript = Transcript(feature)
        self.transcripts.append(transcript)
        key = f"scene-{len(self.transcripts)}"
        self._tasks.append(asyncio.create_task(self._client.stream(feature, key, transcript=transcript)))
        return transcript

    async def events(self, transcript: Transcript) -> list[Recorded]:
        return await history(self.deployment, transcript.request_id) if transcript.request_id else []

    async def until(self, transcript: Transcript, moment: Moment) -> list[Recorded]:
        """The history at the first look at which ``moment`` holds."""
        found: list[Recorded] = []

        async def has_come() -> bool:
            nonlocal found
            found = await self.events(transcript)
            assert not transcript.is_complete, "it was over before its moment came"
            return moment(found)

        await self.deployment.until(has_come, 120, 0.001)
        return found

    async def finish(self) -> None:
        await asyncio.gather(*self._tasks)

    async def owner(self, transcript: Transcript) -> Process:
        return self.deployment.worker(owners(await self.events(transcript))[-1])


def owners(events: list[Recorded]) -> list[str]:
    return [item.event.worker for item in events if isinstance(item.event, Started)]


async def freeze_at(scene: Scene, transcript: Transcript, moment: Moment) -> Process:
    """Stop the owner so that the log stands still exactly at ``moment``: frozen, looked at, and let go if missed."""
    await scene.until(transcript, lambda events: bool(owners(events)))
    owner = await scene.owner(transcript)
    for _ in range(2000):
        owner.signal(signal.SIGSTOP)
        await asyncio.sleep(0.02)  # what was on its way to the log has arrived
        if moment(await scene.events(transcript)):
            return owner
        owner.signal(signal.SIGCONT)
        await asyncio.sleep(0.001)
    raise AssertionError("the moment never came")


@pytest.mark.parametrize(
    ("asked", "moment"),
    [(LONG_PROMPT, mid_prefill), (LONG, mid_decode), (EMOJI, mid_character), (STOP, mid_stop_string)],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_a_killed_workers_answer_is_continued(deploy: Deploy, asked: Feature, moment: Moment) -> None:
    deployment = await deploy(worker=SMALL_STEPS, edges=1)
    expected = await undisturbed(deployment, [asked])
    async with aiohttp.ClientSession() as session:
        scene = Scene(deployment, session)
        # The prompt is not in the cache of the undisturbed run: the whole of it has to be computed.
        transcript = scene.ask(Feature(asked.name, asked.path, {**asked.fields, "cache_salt": "again"}, asked.prompt))
        victim = await freeze_at(scene, transcript, moment)
        victim.kill()
        deployment.remove(victim)
        await scene.finish()
        events = await scene.events(transcript)
    assert len(owners(events)) == 2
    assert (await audit(deployment, scene.transcripts, expected)).wrong == []


async def test_a_worker_that_slept_past_its_lease_is_refused_and_counted(deploy: Deploy) -> None:
    deployment = await deploy(edges=1)
    expected = await undisturbed(deployment, [LONG])
    async with aiohttp.ClientSession() as session:
        scene = Scene(deployment, session)
        transcript = scene.ask(LONG)
        await scene.until(transcript, mid_decode)
        zombie = await scene.owner(transcript)
        zombie.signal(signal.SIGSTOP)
        await scene.until(transcript, lambda events: len(owners(events)) == 2)
        zombie.signal(signal.SIGCONT)
        await scene.finish()
        await deployment.until(lambda: zombie.metric("headrace_worker_fenced_total") >= 1)
    assert zombie.is_running
    assert (await audit(deployment, scene.transcripts, expected)).wrong == []


async def test_a_stream_goes_on_at_another_edge_when_its_edge_is_killed(deploy: Deploy) -> None:
    deployment = await deploy(workers=1)
    expected = await undisturbed(deployment, [LONG])
    async with aiohttp.ClientSession() as session:
        scene = Scene(deployment, session)
        transcripts = [scene.ask(LONG) for _ in range(4)]
        for transcript in transcripts:
            await deployment.until(lambda t=transcript: t.connections and len(t.connections[0].raw) > 5000)
        victim = next(edge for edge in deployment.edges if edge.name == transcripts[0].connections[0].edge)
        victim.kill()
        deployment.remove(victim)
        await scene.finish()
    hurt = [t for t in transcripts if t.connections[0].edge == victim.name]
    assert all(t.connections[-1].edge != victim.name for t in hurt)
    assert (await audit(deployment, transcripts, expected)).wrong == []


async def test_a_server_killed_in_mid_answer_comes_back_with_everything(deploy: Deploy) -> None:
    deployment = await deploy(edges=1, fsync="always", worker={"durability": "strict"}, edge={"durability": "strict"})
    expected = await undisturbed(deployment, [LONG, feature("json_schema")])
    async with aiohttp.ClientSession() as session:
        scene = Scene(deployment, session)
        transcript = scene.ask(LONG)
        scene.ask(feature("json_schema"))
        await scene.until(transcript, mid_decode)
        deployment.server.kill()
        await asyncio.sleep(1.5)
        await asyncio.to_thread(deployment.server.start)
        await scene.finish()
    assert (await audit(deployment, scene.transcripts, expected)).wrong == []
