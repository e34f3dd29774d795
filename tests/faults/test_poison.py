"""A request that kills every worker that computes it: given up with a typed error, and nobody else with it."""

from __future__ import annotations

import asyncio
import re
import sys
from random import Random

import aiohttp
import pytest

from common.events import Failed
from tests.faults.audit import audit, history
from tests.faults.client import Client, Transcript
from tests.faults.conftest import Deploy
from tests.faults.deployment import ROOT, Deployment
from tests.faults.features import COMPLETIONS, Feature
from tests.faults.poison_worker import POISON
from tests.faults.traffic import undisturbed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
MATES = [Feature(f"mate-{k}", fields={"max_tokens": 2500, "seed": k}, prompt=f"mate number {k}") for k in range(7)]
DEADLY = Feature("deadly", prompt=f"drink this: {POISON}")


async def keep_workers(deployment: Deployment, count: int) -> None:
    """What an orchestrator does: replaces the dead."""
    while True:
        for worker in list(deployment.workers):
            if not worker.is_running:
                deployment.remove(worker)
        for _ in range(count - len(deployment.workers)):
            deployment.start_worker()
        await asyncio.sleep(0.1)


async def test_a_poisonous_request_is_quarantined_and_its_batch_mates_are_unharmed(deploy: Deploy) -> None:
    # With three seats each for seven mates, no worker is without one when the poison comes.
    deployment = await deploy(workers=3, worker_module="tests.faults.poison_worker", worker={"max_num_seqs": 3})
    expected = await undisturbed(deployment, MATES)
    keeper = asyncio.create_task(keep_workers(deployment, 3))
    try:
        async with aiohttp.ClientSession() as session:
            client = Client(session, lambda: deployment.edges, Random(3))
            transcripts = [Transcript(mate) for mate in MATES]
            mates = [asyncio.create_task(client.stream(t.feature, t.feature.name, transcript=t)) for t in transcripts]
            for transcript in transcripts:  # long enough to be in the middle of their answers at every death
                await deployment.until(lambda t=transcript: t.connections and len(t.connections[0].raw) > 2000)
            deadly = asyncio.create_task(client.stream(DEADLY, "deadly"))
            await asyncio.gather(*mates)
            verdict = await deadly
            # The same key gets the same end, without a new try.
            async with session.post(
                deployment.edges[1].url + COMPLETIONS,
                json=DEADLY.body(stream=True),
                headers={"Idempotency-Key": "deadly", "X-Headrace-Resumable": "1"},
            ) as answer:
                repeated = await answer.json()
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
    await asyncio.gather(*(deployment.ready(worker) for worker in deployment.workers))
    request_id = await quarantined_id(deployment)
    assert error_of(verdict) == "quarantined"
    assert repeated["error"]["code"] == "quarantined"
    shown = await inspect(deployment, request_id)
    assert "quarantined" in shown
    assert int(re.findall(r"(\d+) takeovers", shown)[0]) >= 4  # those of a busy machine are no deaths
    findings = await audit(deployment, transcripts, expected)
    assert [line for line in findings.wrong if request_id not in line] == []
    assert findings.failed == 1
    shared = {takeover.request_id for takeover in findings.takeovers} - {request_id}
    assert shared, "no mate was beside it when it killed a worker"
    assert findings.checked_answers == len(MATES)


def error_of(transcript: Transcript) -> str:
    """As the stream says it, or as the status of an answer that had not begun."""
    return transcript.answer().error if transcript.is_complete else transcript.gave_up.partition(" ")[2]


async def quarantined_id(deployment: Deployment) -> str:
    (request_id,) = [
        request_id
        for request_id in await deployment.reading.request_ids()
        if isinstance((await history(deployment, request_id))[-1].event, Failed)
    ]
    return request_id


async def inspect(deployment: Deployment, request_id: str) -> str:
    """What ``headrace inspect`` prints."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli", "inspect", request_id, "--redis-url", deployment.server.url),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return output.decode()
