"""One connection shared by many tasks: everybody gets the own answer, and failures reach all who wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis
from redis import asyncio as aredis

from common.transport.line import Line
from tests.servers import Server


@pytest.fixture
async def pool(valkey: Server) -> AsyncIterator[aredis.ConnectionPool]:
    made = aredis.ConnectionPool.from_url(valkey.url, protocol=2)
    yield made
    await made.aclose()


@pytest.fixture
async def line(pool: aredis.ConnectionPool) -> AsyncIterator[Line]:
    opened = Line(pool, timeout_s=30.0)
    yield opened
    await opened.close()


async def connection_id(line: Line) -> int:
    return int(await line.execute("CLIENT", "ID"))


async def test_concurrent_commands_get_their_own_answers_over_one_connection(line: Line) -> None:
    words = [f"word {i} ".encode() * (1 + i % 7 * 3000) for i in range(200)]
    answers = await asyncio.gather(*(line.execute("ECHO", word) for word in words))
    assert answers == words
    ids = await asyncio.gather(*(connection_id(line) for _ in range(5)))
    assert len(set(ids)) == 1


async def test_an_error_is_raised_to_the_one_who_asked(line: Line) -> None:
    good, bad, also_good = await asyncio.gather(
        line.execute("ECHO", "a"),
        line.execute("EVALSHA", "0" * 40, 0),
        line.execute("ECHO", "b"),
        return_exceptions=True,
    )
    assert (good, also_good) == (b"a", b"b")
    assert isinstance(bad, redis.exceptions.NoScriptError)


async def test_a_cancelled_command_does_not_shift_the_answers_of_others(line: Line) -> None:
    before = await connection_id(line)
    given_up = asyncio.create_task(line.execute("ECHO", "given up"))
    kept = asyncio.create_task(line.execute("ECHO", "kept"))
    await asyncio.sleep(0)  # both have been sent
    given_up.cancel()
    assert await kept == b"kept"
    assert await connection_id(line) == before


async def test_a_lost_connection_fails_all_who_wait_and_the_next_command_connects(
    line: Line, pool: aredis.ConnectionPool
) -> None:
    victim = await connection_id(line)
    waiting = [asyncio.create_task(line.execute("BLPOP", f"nothing-{victim}", 0)) for _ in range(3)]
    await asyncio.sleep(0)
    await aredis.Redis(connection_pool=pool).execute_command("CLIENT", "KILL", "ID", victim)
    failures = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(failure, redis.ConnectionError) for failure in failures)
    assert await connection_id(line) != victim


async def test_a_server_that_does_not_answer_is_given_up(pool: aredis.ConnectionPool) -> None:
    line = Line(pool, timeout_s=0.2)
    with pytest.raises(redis.TimeoutError):
        await line.execute("BLPOP", "nothing-ever", 0)
    line._timeout_s = 30.0  # of the next connection
    assert await line.execute("ECHO", "here") == b"here"
    await line.close()


async def test_a_retired_connection_still_answers_and_another_takes_over(line: Line) -> None:
    old = await connection_id(line)
    under_way = asyncio.create_task(line.execute("ECHO", "under way"))
    await asyncio.sleep(0)
    line.retire()
    assert await connection_id(line) != old
    assert await under_way == b"under way"
