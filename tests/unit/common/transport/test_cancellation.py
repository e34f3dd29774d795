"""A cancelled task ends, even when the library forgets it; what the library closes beside a call is an outage."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from common.transport.cluster import _all_answered, _on_shared_node
from common.transport.failures import TRANSIENT, heeding_cancellation


async def test_a_cancellation_that_the_call_swallows_still_ends_the_task() -> None:
    at_work = asyncio.Event()

    async def forgetful() -> str:
        at_work.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        return "reply"

    task = asyncio.create_task(heeding_cancellation(forgetful()))
    await at_work.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_call_that_is_left_alone_gives_its_result() -> None:
    async def reply() -> str:
        return "reply"

    assert await heeding_cancellation(reply()) == "reply"


async def test_a_stream_that_the_library_closed_beside_a_call_is_a_lost_connection() -> None:
    async def writes_to_nothing() -> None:
        writer = None
        writer.writelines([b"PING"])  # type: ignore[attr-defined]

    with pytest.raises(TRANSIENT, match="closed beside the call"):
        await _on_shared_node(writes_to_nothing())


async def test_so_it_is_among_several_commands_whose_failures_the_library_notes() -> None:
    class Node:
        async def execute_pipeline(self, commands: list[SimpleNamespace]) -> None:
            commands[0].result = AttributeError("'NoneType' object has no attribute 'gets'")

    commands = [SimpleNamespace(result=None) for _ in range(2)]
    with pytest.raises(TRANSIENT, match="closed beside the call"):
        await _on_shared_node(_all_answered(Node(), commands))  # type: ignore[arg-type]
