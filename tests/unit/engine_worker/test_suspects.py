"""Suspects are tried one after another; whoever waits says so in its log and can be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.events import CancelReason, Ended, Milestone
from common.transport.records import Owned
from engine_worker.handoff import Add
from engine_worker.suspects import Suspects
from tests.unit.engine_worker.text_world import Inside, request


class Trial:
    """Suspects of one worker, and its engine, which steps when told to."""

    def __init__(self) -> None:
        self.inside = Inside()
        self.suspects = Suspects(self.inside.stage, self.inside.commands)

    def accuse(self, *names: str) -> None:
        for name in names:
            request_id = f"0-{name}"
            self.inside.log.streams[request_id] = []
            owned = Owned(request(request_id, max_tokens=8), 1, 0, (), None, 2, 0.0, 2)
            resumed = self.inside.resumer.resume(owned, now=2.0)
            self.inside.stage.adopt(resumed)
            self.suspects.admit(resumed)

    def said(self, name: str) -> list[str]:
        return [e.what for e in self.inside.log.streams[f"0-{name}"] if isinstance(e, Milestone)]

    def begun(self) -> list[str]:
        commands = self.inside.commands
        taken = [commands.get() for _ in iter(commands.empty, True)]
        return [command.request_id for command in taken if isinstance(command, Add)]

    async def settle(self) -> None:
        """The log answers, and the suspects' task has its turns."""
        for _ in range(6):
            await self.inside.write()
            await asyncio.sleep(0.02)


@asynccontextmanager
async def trial() -> AsyncIterator[Trial]:
    made = Trial()
    task = asyncio.create_task(made.suspects.let_in_forever())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_only_one_is_tried_until_it_has_drawn_a_token() -> None:
    async with trial() as made:
        made.accuse("a", "b", "c")
        await made.settle()
        assert made.begun() == ["0-a"]
        assert [made.said(name) for name in "abc"] == [[], ["held_back"], ["held_back"]]
        made.inside.stage.live["0-a"].timeline.last_token_s = 1.0
        await made.settle()
        assert made.begun() == ["0-b"]
        assert made.said("b") == ["held_back", "let_in"]
        assert made.said("c") == ["held_back"]


async def test_the_next_one_is_tried_when_a_suspect_ends_or_is_taken_away() -> None:
    async with trial() as made:
        made.accuse("a", "b", "c")
        made.inside.stage.cancel("0-a", CancelReason.API)
        await made.settle()
        assert "0-b" in made.begun()
        made.inside.stage.cancel("0-b", CancelReason.API)
        await made.settle()
        assert "0-c" in made.begun()


async def test_a_suspect_that_waits_can_be_cancelled_and_is_never_begun() -> None:
    async with trial() as made:
        made.accuse("a", "b")
        made.inside.stage.cancel("0-b", CancelReason.API)
        await made.settle()
        assert isinstance(made.inside.log.streams["0-b"][-1], Ended)
        made.inside.stage.live["0-a"].timeline.last_token_s = 1.0
        await made.settle()
        assert made.begun() == ["0-a"]
