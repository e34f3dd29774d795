"""One key, many equal requests at once over several edges: one generation, the same answer for all."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from tests.faults.answers import answer_of_document, answer_of_stream, blocks_of
from tests.faults.conftest import Deploy
from tests.faults.features import COMPLETIONS, Feature

pytestmark = [pytest.mark.e2e]
ASKED = Feature("sampled", fields={"temperature": 1.0, "seed": None, "max_tokens": 200})


async def test_fifty_equal_posts_run_once_and_another_body_is_refused(deploy: Deploy) -> None:
    deployment = await deploy(workers=1)
    (worker,) = deployment.workers
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        answers = await asyncio.gather(*(equal(session, deployment.edges[k % 2].url) for k in range(50)))
        assert {status for status, _ in answers} == {200}
        assert len({body for _, body in answers}) == 1, "all see the same bytes"
        assert answer_of_stream(blocks_of(answers[0][1])).is_whole
        assert len(await deployment.reading.request_ids()) == 1
        assert worker.metric("headrace_worker_claims_total") == 1
        status, body = await equal(session, deployment.edges[1].url, max_tokens=201)
        assert status == 409
        assert b'"idempotency_conflict"' in body


async def equal(session: aiohttp.ClientSession, url: str, **more: Any) -> tuple[int, bytes]:
    """One of the equal requests, unless ``more`` makes it another."""
    headers = {"Idempotency-Key": "the-one", "X-Headrace-Resumable": "1"}
    async with session.post(url + COMPLETIONS, json=ASKED.body(stream=True, **more), headers=headers) as response:
        return response.status, await response.read()


async def test_a_document_asked_for_twice_at_once_is_generated_once(deploy: Deploy) -> None:
    deployment = await deploy(workers=1)
    async with aiohttp.ClientSession() as session:

        async def ask(url: str) -> dict[str, Any]:
            body, headers = ASKED.body(stream=False), {"Idempotency-Key": "two"}
            async with session.post(url + COMPLETIONS, json=body, headers=headers) as response:
                document: dict[str, Any] = await response.json()
                return document

        one, other = await asyncio.gather(*(ask(edge.url) for edge in deployment.edges))
    assert one == other
    assert answer_of_document(one).is_whole
