"""What comes in: room, grammars off the loop, cancellations at any moment, logs that cannot be continued."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from common.errors import InvalidRequest, LogUnavailable
from common.events import Cancel, CancelReason, Drain, Ended, Failed, Grammar, InboxEvent, Recorded, Started, Usage
from common.transport.records import Owned
from engine_worker import intake as intake_module
from engine_worker.handoff import Add
from engine_worker.intake import Intake, Room
from engine_worker.reporting import Reporting
from engine_worker.sequence import Sequence
from tests.unit.engine_worker.text_world import Inside, request

GRAMMAR = Grammar(kind="regex", source="a+")


class FakeQueue:
    """Hands out what the test has put there; remembers how much was asked for."""

    def __init__(self) -> None:
        self.waiting: list[Owned] = []
        self.orphans: list[Owned] = []
        self.inbox: asyncio.Queue[InboxEvent] = asyncio.Queue()
        self.limits: list[int] = []
        self.outages = 0

    async def claim(self, limit: int, block_ms: int = 0) -> list[Owned]:
        if self.outages:
            self.outages -= 1
            raise LogUnavailable("away")
        self.limits.append(limit)
        taken, self.waiting = self.waiting[:limit], self.waiting[limit:]
        await asyncio.sleep(0 if taken else min(block_ms, 5) / 1000)
        return taken

    async def takeover_scan(self, limit: int) -> list[Owned]:
        taken, self.orphans = self.orphans[:limit], self.orphans[limit:]
        return taken

    async def read_inbox(self, block_ms: int = 0) -> list[InboxEvent]:
        return [await self.inbox.get()]


class FakePreparing:
    """Compiles when the test allows it, on whatever thread it is called."""

    def __init__(self) -> None:
        self.may_compile = threading.Event()
        self.threads: list[str] = []
        self.error: InvalidRequest | None = None
        self.prepared: list[int] = []

    def prepare(self, sequence: Sequence) -> None:
        self.prepared.append(sequence.seq_id)

    def compile(self, grammar: Grammar) -> None:
        self.threads.append(threading.current_thread().name)
        assert self.may_compile.wait(10)
        if self.error is not None:
            raise self.error


class Scene:
    def __init__(self, room: int) -> None:
        self.inside = Inside()
        self.queue = FakeQueue()
        self.preparing = FakePreparing()
        self.intake = Intake(
            self.queue,
            self.inside.stage,
            self.inside.commands,
            self.inside.resumer,
            self.preparing,
            room=Room(free=lambda: room - self.inside.stage.num_sequences),
            reporting=Reporting(self.inside.metrics, self.inside.stage._reporting._tracing, "w"),
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(120):
            while not condition():  # noqa: ASYNC110 - several tasks have to take their turns
                await asyncio.sleep(0.002)

    def added(self) -> list[str]:
        """Request ids given to the engine so far."""
        found = []
        while not self.inside.commands.empty():
            command = self.inside.commands.get()
            if isinstance(command, Add):
                found.append(command.request_id)
        return found


@asynccontextmanager
async def scene(room: int = 8) -> AsyncIterator[Scene]:
    made = Scene(room)
    tasks = [
        asyncio.create_task(made.intake.claim_forever()),
        asyncio.create_task(made.intake.take_over_forever(0.01)),
        asyncio.create_task(made.intake.read_inbox_forever()),
        asyncio.create_task(made.intake.enforce_deadlines_forever()),
    ]
    try:
        yield made
    finally:
        made.preparing.may_compile.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def owned(request_id: str = "0-r1", *, epoch: int = 1, events=(), cancel=None, **parameters) -> Owned:
    recorded = tuple(Recorded(n, event) for n, event in enumerate(events, start=1))
    return Owned(request(request_id, **parameters), epoch, len(recorded), recorded, cancel, 0, 0.0)


async def test_no_more_is_claimed_than_there_is_room_for() -> None:
    async with scene(room=3) as made:
        made.queue.waiting = [owned(f"0-r{i}") for i in range(10)]
        await made.until(lambda: len(made.inside.stage.live) == 3)
        await asyncio.sleep(0.05)
        assert len(made.queue.waiting) == 7
        assert made.queue.limits[-1] == 0
        made.inside.stage.cancel("0-r0", CancelReason.API)
        await made.until(lambda: len(made.queue.waiting) == 6)


async def test_orphans_are_taken_over_too() -> None:
    async with scene() as made:
        made.queue.orphans = [owned("0-r1")]
        await made.until(lambda: bool(made.inside.stage.live))
        assert made.inside.metrics.takeovers._value.get() == 1
        assert made.added() == ["0-r1"]


async def test_a_grammar_is_compiled_elsewhere_while_others_start() -> None:
    async with scene() as made:
        made.queue.waiting = [owned("0-slow", grammar=GRAMMAR), owned("0-fast")]
        await made.until(lambda: "0-fast" in made.inside.stage.live)
        assert made.intake.num_starting == 1
        assert "0-slow" not in made.inside.stage.live
        made.preparing.may_compile.set()
        await made.until(lambda: "0-slow" in made.inside.stage.live)
        assert made.added() == ["0-fast", "0-slow"]
        assert made.preparing.threads != [threading.current_thread().name]


async def test_a_bad_grammar_fails_the_request_before_it_started() -> None:
    async with scene() as made:
        made.preparing.error = InvalidRequest("no such rule")
        made.preparing.may_compile.set()
        made.queue.waiting = [owned(grammar=GRAMMAR)]
        await made.until(lambda: bool(made.inside.stage.live))
        await made.inside.write()
        (event,) = made.inside.log.streams["0-r1"]
        assert isinstance(event, Failed)
        assert (event.code, event.message) == ("invalid_request", "no such rule")
        assert made.added() == []


async def test_a_cancellation_during_compilation_is_not_lost() -> None:
    async with scene() as made:
        made.queue.waiting = [owned(grammar=GRAMMAR)]
        await made.until(lambda: made.intake.num_starting == 1)
        made.queue.inbox.put_nowait(Cancel(request_id="0-r1", reason=CancelReason.API))
        await made.until(made.queue.inbox.empty)
        made.preparing.may_compile.set()
        await made.until(lambda: bool(made.inside.stage.live))
        await made.inside.write()
        assert isinstance(made.inside.log.streams["0-r1"][-1], Ended)
        assert made.added() == []


async def test_a_request_owned_again_during_compilation_starts_once_under_the_new_epoch() -> None:
    async with scene() as made:
        made.queue.waiting = [owned(grammar=GRAMMAR)]
        await made.until(lambda: made.intake.num_starting == 1)
        made.queue.waiting = [owned(epoch=2, grammar=GRAMMAR)]
        await made.until(lambda: len(made.preparing.threads) == 2)
        made.preparing.may_compile.set()
        await made.until(lambda: bool(made.inside.stage.live))
        await asyncio.sleep(0.02)
        assert made.inside.stage.live["0-r1"].epoch == 2
        assert made.added() == ["0-r1"]


async def test_a_request_cancelled_before_it_was_owned_is_ended_unrun() -> None:
    async with scene() as made:
        made.queue.waiting = [owned(cancel=CancelReason.ORPHANED)]
        await made.until(lambda: bool(made.inside.stage.live))
        await made.inside.write()
        stream = made.inside.log.streams["0-r1"]
        assert isinstance(stream[-1], Ended)
        assert stream[-1].cancelled is CancelReason.ORPHANED
        assert made.added() == []


async def test_a_log_that_cannot_be_continued_fails_the_request() -> None:
    async with scene() as made:
        events = (Started(epoch=1, t=0.0, worker="w"), Ended(epoch=1, t=0.0, usage=Usage()))
        made.inside.log.streams["0-r1"] = list(events)
        made.queue.orphans = [owned(epoch=2, events=events)]
        await made.until(lambda: bool(made.inside.stage.live))
        await made.inside.write()
        assert made.inside.log.streams["0-r1"][-1].code == "log_corrupt"


async def test_deadlines_are_enforced() -> None:
    async with scene() as made:
        made.queue.waiting = [owned("0-late", deadline_s=2.0), owned("0-other")]
        await made.until(lambda: "0-late" in made.inside.stage.live and made.inside.stage.live["0-late"].is_over)
        assert made.inside.stage.live["0-late"].cancelled is CancelReason.DEADLINE
        assert not made.inside.stage.live["0-other"].is_over


async def test_an_outage_of_the_log_is_sat_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "_BACKOFF_S", 0.001)
    made = Scene(8)
    made.queue.outages = 3
    made.queue.waiting = [owned()]
    claims = asyncio.create_task(made.intake.claim_forever())
    await made.until(lambda: bool(made.inside.stage.live))
    made.intake.is_open = False
    await claims


async def test_a_drain_in_the_inbox_is_passed_on() -> None:
    async with scene() as made:
        asked: list[bool] = []
        made.intake.on_drain = asked.append
        made.queue.inbox.put_nowait(Drain(handover=True))
        await made.until(lambda: bool(asked))
        assert asked == [True]


async def test_requests_that_still_compile_can_be_given_back() -> None:
    async with scene() as made:
        made.queue.waiting = [owned(grammar=GRAMMAR)]
        await made.until(lambda: made.intake.num_starting == 1)
        assert made.intake.drop_starting() == ["0-r1"]
        made.preparing.may_compile.set()
        await asyncio.sleep(0.05)
        assert made.added() == []
        assert not made.inside.stage.live
