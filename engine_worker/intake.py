"""What comes in: new requests that the engine has room for, those of dead workers, cancellations, deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

from common.errors import HeadraceError, LogUnavailable
from common.events import Cancel, CancelReason, Drain, Grammar, InboxEvent, Tokens
from common.telemetry.logging import get_logger
from common.transport.records import Owned
from engine_worker.handoff import Add, Commands
from engine_worker.live_request import LiveRequest, Logged
from engine_worker.output_stage import OutputStage
from engine_worker.reporting import Reporting
from engine_worker.resume import Resumed, Resumer
from engine_worker.sequence import Sequence
from engine_worker.suspects import SUSPECT_STRIKES, Suspects

log: Final = get_logger(__name__)

T = TypeVar("T")

_BLOCK_MS: Final = 500
_BUSY_WAIT_S: Final = 0.05
_BACKOFF_S: Final = 0.5
_DEADLINE_TICK_S: Final = 0.1
# An idle engine begins as soon as it is given the interpreter. What this thread has to do now, it does beside the step.
_HANDOVER_S: Final = 50e-6


class Queue(Protocol):
    """The part of `common.transport.ownership.Ownership` that takes requests in."""

    async def claim(self, limit: int, block_ms: int = 0) -> list[Owned]: ...

    async def claim_urgent(self, limit: int) -> list[Owned]: ...

    async def takeover_scan(self, limit: int) -> list[Owned]: ...

    async def read_inbox(self, block_ms: int = 0) -> list[InboxEvent]: ...


class Preparing(Protocol):
    """What has to happen to a request before the step loop may see it; `KvCacheManager` and `GrammarCompiler`."""

    def prepare(self, sequence: Sequence) -> None: ...

    def compile(self, grammar: Grammar) -> None: ...


@dataclass(frozen=True, slots=True)
class Room:
    """How many sequences the engine could begin now; and of the highest priority class, when there is no room for
    others, because some that run would give way to them."""

    free: Callable[[], int]
    urgent: Callable[[], int] = lambda: 0


class Intake:
    """The tasks that bring work in. Owned by the I/O loop."""

    def __init__(
        self,
        queue: Queue,
        output: OutputStage,
        commands: Commands,
        resumer: Resumer,
        preparing: Preparing,
        *,
        room: Room,
        reporting: Reporting,
    ) -> None:
        self._queue = queue
        self._output = output
        self._commands = commands
        self._resumer = resumer
        self._preparing = preparing
        self._room = room
        self._reporting = reporting
        self._suspects = Suspects(output, commands)
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._cancelled_early: dict[str, CancelReason] = {}
        self.on_drain: Callable[[bool], None] = lambda handover: None
        """Called with ``handover`` when the inbox asks for it."""
        self.is_open = True
        """False: nothing new is taken; what is already ours goes on."""

    @property
    def num_starting(self) -> int:
        """Owned requests that wait for their grammar."""
        return len(self._starting)

    async def claim_forever(self) -> None:
        """Take new requests while the engine has room."""
        while self.is_open:
            room = self._free()
            owned = await self._patiently(partial(self._queue.claim, room, _BLOCK_MS if room else 0))
            self._begin_all(owned, is_takeover=False)
            if not room and (urgent := self._room.urgent() - self.num_starting) > 0:
                owned = await self._patiently(partial(self._queue.claim_urgent, urgent))
                self._begin_all(owned, is_takeover=False)
            if not room:
                self._output.room_changed.clear()
                if not self._free():
                    await _wait_briefly(self._output.room_changed, _BUSY_WAIT_S)

    async def take_over_forever(self, interval_s: float) -> None:
        """Take the requests of workers that are gone, as far as there is room for them."""
        while self.is_open:
            owned = await self._patiently(partial(self._queue.takeover_scan, self._free()))
            self._begin_all(owned, is_takeover=True)
            await asyncio.sleep(interval_s)

    async def read_inbox_forever(self) -> None:
        """Cancellations at once, instead of with the next append."""
        while True:
            for event in await self._patiently(lambda: self._queue.read_inbox(_BLOCK_MS)):
                match event:
                    case Cancel():
                        self._cancel(event.request_id, event.reason)
                    case Drain():
                        self.on_drain(event.handover)

    async def enforce_deadlines_forever(self) -> None:
        """End what runs past its deadline."""
        while True:
            await asyncio.sleep(_DEADLINE_TICK_S)
            now = time.time()
            late = [
                live.request_id
                for live in self._output.live.values()
                if live.request.deadline_s is not None and live.request.deadline_s < now and not live.is_over
            ]
            for request_id in late:
                self._output.cancel(request_id, CancelReason.DEADLINE)

    async def let_in_forever(self) -> None:
        """Begin held suspects, one after another."""
        await self._suspects.let_in_forever()

    def drop_starting(self) -> list[str]:
        """Forget the requests that wait for their grammar; their ids, for handing them back."""
        request_ids = list(self._starting)
        for task in self._starting.values():
            task.cancel()
        self._starting.clear()
        return request_ids

    def _free(self) -> int:
        return max(0, self._room.free() - self.num_starting)

    def _begin_all(self, owned: Iterable[Owned], *, is_takeover: bool) -> None:
        for one in owned:
            self._reporting.claimed(is_takeover=is_takeover or one.attempts > 0)
            earlier = self._starting.pop(one.request.request_id, None)
            if earlier is not None:  # owned again, under a new epoch
                earlier.cancel()
            if one.request.sampling.grammar is None:
                self._start(one)
            else:
                task = asyncio.create_task(self._compile_and_start(one))
                self._starting[one.request.request_id] = task

    async def _compile_and_start(self, owned: Owned) -> None:
        """Grammars may take seconds: on another thread, and the other requests do not wait."""
        request_id, grammar = owned.request.request_id, owned.request.sampling.grammar
        assert grammar is not None
        error: HeadraceError | None = None
        try:
            await asyncio.to_thread(self._preparing.compile, grammar)
        except HeadraceError as caught:
            error = caught
        if self._starting.get(request_id) is asyncio.current_task():
            del self._starting[request_id]
            self._start(owned, error)

    def _start(self, owned: Owned, error: HeadraceError | None = None) -> None:
        now = time.time()
        cancel = self._cancelled_early.pop(owned.request.request_id, owned.cancel)
        if error is not None:
            self._refuse(owned, error, now)
            return
        try:
            resumed = self._resumer.resume(owned, now)
        except HeadraceError as corrupt:
            self._refuse(owned, corrupt, now)
            return
        self._output.adopt(resumed)
        if cancel is not None:
            self._output.cancel(resumed.live.request_id, cancel)
        elif resumed.sequences:
            for sequence in resumed.sequences:
                self._preparing.prepare(sequence)
                if sequence.num_output_tokens:
                    self._reporting.computed_again(sequence.num_tokens)
            if owned.strikes >= SUSPECT_STRIKES:
                self._suspects.admit(resumed)
            else:
                self._commands.put(Add(resumed.live.request_id, resumed.sequences))
                if self._output.num_sequences == len(resumed.sequences):
                    time.sleep(_HANDOVER_S)

    def _refuse(self, owned: Owned, error: HeadraceError, now: float) -> None:
        """End a request that cannot be run at all, in its log."""
        events = tuple(recorded.event for recorded in owned.events)
        num_tokens = sum(len(event.token_ids) for event in events if isinstance(event, Tokens))
        logged = Logged(events=events, completion_tokens=num_tokens)
        live = LiveRequest(owned.request, owned.epoch, {}, logged, claimed_s=now)
        self._output.adopt(Resumed(live, ()))
        self._output.fail(live.request_id, error)

    def _cancel(self, request_id: str, reason: CancelReason) -> None:
        if request_id in self._starting:
            self._cancelled_early[request_id] = reason
        else:
            self._output.cancel(request_id, reason)

    async def _patiently(self, call: Callable[[], Awaitable[list[T]]]) -> list[T]:
        """The answer; nothing, after a pause, while the log cannot be reached."""
        try:
            return await call()
        except LogUnavailable as error:
            self._reporting.log_failed()
            log.warning("the log cannot be reached", reason=error.message)
            await asyncio.sleep(_BACKOFF_S)
            return []


async def _wait_briefly(event: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return
