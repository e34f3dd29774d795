"""The connections between edge, worker and log are cut again and again, all of them at once, under many streams."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

from common.transport import RedisSettings
from tests.integration.edge.letters_model import answer
from tests.integration.edge.running_edge import ThreadedEdge
from tests.integration.edge.scripted_worker import ScriptedWorker
from tests.integration.edge.wire import CHAT, body, chunks_of, events_of, is_complete, post, send, split, text_of, until
from tests.servers import Server

STREAMS = 60
TOKENS = 40


def counted(valkey: Server, settings: RedisSettings) -> dict[bytes, bytes]:
    """What the log counts as admitted, over all partitions; without the measured drain."""
    with valkey.client() as client:
        found = [client.hgetall(key) for key in client.scan_iter(match=f"{settings.key_prefix}*load*", count=1000)]
    assert found
    fields = {name: value for one in found for name, value in one.items() if value != b"0"}
    return {name: value for name, value in fields.items() if name not in (b"rate", b"win", b"win_n")}


async def test_whatever_is_cut_streams_are_exact_and_nothing_stays_counted(
    edge: ThreadedEdge, worker: ScriptedWorker, valkey: Server, redis_settings: RedisSettings
) -> None:
    worker.step_s = 0.02
    draw = random.Random(17)
    cuts = 0

    def cut(kind: str) -> None:
        with valkey.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")

    async def cut_and_cut() -> None:
        nonlocal cuts
        while True:
            began = time.monotonic()
            for kind in draw.choice([("pubsub",), ("normal",), ("normal", "pubsub")]):
                await asyncio.to_thread(cut, kind)
            cuts += 1
            # Whoever was cut has to connect before the next time, for which this machine needs longer than for a cut.
            await asyncio.sleep(0.05 + draw.random() * 0.2 + 5 * (time.monotonic() - began))

    async def leave() -> None:
        connection = await send(edge, CHAT, body(max_tokens=2000, stream=True))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(draw.random() * 3):
                await connection[0].read(-1)
        connection[1].transport.abort()

    cutting = asyncio.create_task(cut_and_cut())
    leaving = [asyncio.create_task(leave()) for _ in range(STREAMS // 3)]

    async def read(number: int, num_tokens: int) -> None:
        key = {"Idempotency-Key": f"cut-{number}"} if number % 2 else {}
        status, _, raw_body = split(await post(edge, CHAT, body(max_tokens=num_tokens, stream=True), key))
        assert status == 200
        assert is_complete(raw_body)
        assert text_of(events_of(chunks_of(raw_body))) == answer(num_tokens)

    number = 0
    while number < STREAMS or cuts < 4:
        tokens = [draw.choice([1, 7, TOKENS]) for _ in range(STREAMS)]
        await asyncio.gather(*(read(number + i, num_tokens) for i, num_tokens in enumerate(tokens)))
        number += STREAMS
    await asyncio.gather(*leaving)
    cutting.cancel()
    services = edge.services
    await until(lambda: not worker.running)
    await until(lambda: not services.occupancy.generations and not services.occupancy.tally("").held)
    assert len(worker.seen) == len({owned.request.request_id for owned in worker.seen})
    await until(lambda: not counted(valkey, redis_settings))
