"""News that go from the subscription to the connection, and readers that hear none because there are none."""

from __future__ import annotations

import asyncio
from typing import Any

from edge.follower import Follower, Gap
from tests.integration.edge.letters_model import answer
from tests.integration.edge.running_edge import ThreadedEdge
from tests.integration.edge.scripted_worker import ScriptedWorker
from tests.integration.edge.wire import CHAT, body, chunks_of, events_of, is_complete, post, split, text_of, until

TOKENS = 60


def followers(edge: ThreadedEdge) -> list[Follower]:
    return list(edge.services.relay)


def size_sum(edge: ThreadedEdge) -> float:
    sizes: Any = edge.services.metrics.http_response_size.labels(CHAT)
    return float(sizes._sum.get())


async def test_what_is_written_directly_is_counted_with_the_rest(edge: ThreadedEdge, worker: ScriptedWorker) -> None:
    worker.step_s = 0.01
    _, _, raw = split(await post(edge, CHAT, body(max_tokens=TOKENS, stream=True)))
    assert is_complete(raw)
    assert text_of(events_of(chunks_of(raw))) == answer(TOKENS)
    await until(lambda: size_sum(edge) == len(chunks_of(raw)))


async def test_an_engine_that_pauses_makes_no_reader_read_the_log(edge: ThreadedEdge, worker: ScriptedWorker) -> None:
    worker.step_s = 0.01
    reading = [asyncio.create_task(post(edge, CHAT, body(max_tokens=TOKENS, stream=True))) for _ in range(3)]
    await until(lambda: len(followers(edge)) == 3 and all(reader.position > 5 for reader in followers(edge)))
    worker.steps.clear()
    await until(lambda: sorted(reader.position for reader in followers(edge)) == worker.lengths)
    reads: Any = edge.services.metrics.catch_up_reads.labels(Gap.QUIET)
    before = reads._value.get()
    checks = {reader: reader.quiet_checks for reader in followers(edge)}
    await until(lambda: all(reader.quiet_checks > checks[reader] + 1 for reader in checks))
    assert reads._value.get() == before
    worker.steps.set()
    for task in reading:
        _, _, raw = split(await task)
        assert text_of(events_of(chunks_of(raw))) == answer(TOKENS)
