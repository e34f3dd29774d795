"""Follows requests: merges the frames that workers push with reads of the log, so that each reader sees each event
once, in order, without a gap.

The log is the truth and a frame is a hint, so a lost frame costs delay and never an event, and a slow reader costs a
bounded buffer: the stream in Redis is the buffer. What a reader keeps and drops is decided in `edge.follower`; here is
what happens around it, all on one event loop:

* frames are offered as they are read from the edge's one subscription, and go on to the readers that wait for them;
* a clock asks the log how far the requests are whose readers heard nothing for a while;
* a task tells the log which requests still have readers;
* reads of the log run in tasks of their own, because a reader that is cancelled in the middle of one must not take a
  Redis connection with it.
"""

from __future__ import annotations

import asyncio
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

from common.errors import LogCorrupt, LogUnavailable
from common.telemetry.logging import get_logger
from common.transport import Resubscribed
from edge.follower import Follower, Gap

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

    from common.errors import HeadraceError
    from common.events import Recorded
    from common.telemetry.metrics import EdgeMetrics
    from common.transport import Attached, Frame, FrameBus, Reading
    from edge.config import StreamSettings
    from edge.tally import Tally

MAX_PARALLEL_READS: Final = 16
TICKS_A_QUIET_SPELL: Final = 3
ANSWER_WITHIN_S: Final = 1.0
MAX_BACKOFF_DOUBLINGS: Final = 3
_log = get_logger(__name__)
T = TypeVar("T")


class Relay:
    """All readers of one edge process. Start `run` as a task; then `follow`, `batch` ..., `leave`."""

    def __init__(
        self, reading: Reading, settings: StreamSettings, metrics: EdgeMetrics, *, edge_id: str, refresh_s: float
    ) -> None:
        self._reading = reading
        self._metrics = metrics
        self._settings = settings
        self._tick_s = settings.quiet_check_s / TICKS_A_QUIET_SPELL
        self._edge_id = edge_id
        self._refresh_s = refresh_s
        self._followers: dict[str, tuple[Follower, ...]] = {}
        self._read_slots = asyncio.Semaphore(MAX_PARALLEL_READS)
        self._reads: dict[Follower, asyncio.Task[Attached]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return sum(map(len, self._followers.values()))

    def __iter__(self) -> Iterator[Follower]:
        return chain.from_iterable(list(self._followers.values()))

    def follow(self, request_id: str, *, after: int = 0, from_log: bool, tally: Tally | None = None) -> Follower:
        """A new reader of events after + 1, ... With ``from_log`` its first act is to read the log; without, the
        caller is about to submit the request (which registers this edge for its frames). Frames that wait for the
        reader count in ``tally``."""
        gap = Gap.ATTACH if from_log else None
        capacity = self._settings.reader_buffer_events
        follower = Follower(request_id, after=after, capacity=capacity, gap=gap, tally=tally)
        self._followers[request_id] = (*self._followers.get(request_id, ()), follower)
        return follower

    def leave(self, follower: Follower) -> None:
        """The reader is gone; without another one here, frames of its request are not wanted any more."""
        follower.drop()
        rest = tuple(other for other in self._followers.get(follower.request_id, ()) if other is not follower)
        if rest:
            self._followers[follower.request_id] = rest
        elif self._followers.pop(follower.request_id, None) and not follower.is_ended:
            self._start(self._detach(follower.request_id))

    def interrupt_all(self, why: HeadraceError) -> None:
        """Every reader gets ``why`` instead of its next events."""
        for follower in self:
            follower.interrupt(why)

    def interrupt_resumable(self, limit: int, why: HeadraceError) -> None:
        """Up to ``limit`` readers that can go on at another edge get ``why`` instead of their next events."""
        resumable = (f for f in self if f.may_be_handed_over and not f.is_interrupted)
        for follower in islice(resumable, limit):
            follower.interrupt(why)

    async def attach(self, follower: Follower) -> Attached:
        """Read the log for ``follower`` and say what the request is. Raises `StreamExpired`, `LogUnavailable`.

        A read that is under way (its caller was cancelled) is joined: two at once would keep events twice.
        """
        read = self._reads.get(follower)
        if read is None:
            read = self._reads[follower] = self._start(self._catch_up(follower))
            read.add_done_callback(lambda _: self._reads.pop(follower, None))
        return await asyncio.shield(read)

    async def batch(self, follower: Follower) -> list[Recorded]:
        """The next events, at least one. May be cancelled at any time without losing any.

        Raises `StreamExpired` when the request is gone from the log, `LogCorrupt` when its history cannot be
        continued, `LogUnavailable` when Redis stays away for longer than ``log_outage_s``.
        """
        while True:
            await follower.changed()
            taken = follower.take()
            if taken:
                return taken
            if follower.gap:
                await self._read_unless_interrupted(follower)

    async def run(self, bus: FrameBus) -> None:
        """Serves all readers until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(bus.run(self._take))
            group.create_task(self._watch_for_quiet())
            group.create_task(self._keep_alive())

    async def close(self) -> None:
        """Waits for reads under way; nobody follows any more."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take(self, signal: Resubscribed | tuple[Frame, ...]) -> None:
        """What the edge's subscription says, as it is read from its socket."""
        if isinstance(signal, Resubscribed):
            for follower in self:
                follower.mark_gap(Gap.RESUBSCRIBED)
        else:
            self._metrics.frames.inc(len(signal))
            self._hand_out(signal)

    def _hand_out(self, frames: Sequence[Frame]) -> None:
        """Frames of one request stand together, and its readers get them together."""
        readers: tuple[Follower, ...] = ()
        for frame in frames:
            found = self._followers.get(frame.request_id, ())
            if found is not readers:
                for follower in readers:
                    follower.flush()
                readers = found
            for follower in readers:
                follower.offer(frame.n, frame.payload)
        for follower in readers:
            follower.flush()

    async def _watch_for_quiet(self) -> None:
        """Whether the log is longer than what a reader that heard nothing has; the longer the silence, the more rarely
        asked. One question for many readers: at most streams it is quiet between two tokens."""
        while True:
            await asyncio.sleep(self._tick_s)
            silent = [follower for follower in self if self._is_silent(follower)]
            if silent:
                await self._look_after(silent)

    def _is_silent(self, follower: Follower) -> bool:
        follower.quiet_ticks += 1
        patience = TICKS_A_QUIET_SPELL << min(follower.quiet_checks, MAX_BACKOFF_DOUBLINGS)
        if follower.quiet_ticks < patience or follower.gap:
            return False
        follower.quiet_ticks = 0
        follower.quiet_checks += 1
        return True

    async def _look_after(self, silent: Sequence[Follower]) -> None:
        """Marks those that have missed something, or all when the log does not answer: then each waits for it.

        What is in the log may still be on its way here as a frame, so whoever is behind gets a little more time.
        """
        asked = {follower: follower.position for follower in silent}
        question = self._start(self._reading.lengths({follower.request_id for follower in silent}))
        await asyncio.wait({question}, timeout=max(self._settings.quiet_check_s, ANSWER_WITHIN_S))
        failed = not question.done() or question.exception() is not None
        lengths = {} if failed else question.result()
        behind: list[tuple[Follower, int]] = []
        for follower, position in asked.items():
            length = lengths.get(follower.request_id)
            if length is None or length < position:
                follower.mark_gap(Gap.QUIET)
            elif length > follower.position:
                behind.append((follower, length))
        if behind:
            await asyncio.sleep(self._tick_s)
            for follower, length in behind:
                if length > follower.position:
                    follower.mark_gap(Gap.QUIET)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s)
            if not self._followers:
                continue
            try:
                await self._reading.keep_alive(list(self._followers))
            except LogUnavailable:
                self._metrics.log_errors.labels("keep_alive").inc()
                _log.warning("cannot say which requests have readers", readers=len(self))

    async def _read_unless_interrupted(self, follower: Follower) -> None:
        """`_read_with_patience`, which may take long, until the reader has to stop."""
        read = asyncio.ensure_future(self._read_with_patience(follower))
        stop = asyncio.ensure_future(follower.interrupted())
        try:
            await asyncio.wait({read, stop}, return_when=asyncio.FIRST_COMPLETED)
            if read.done():
                read.result()
        finally:
            read.cancel()
            stop.cancel()

    async def _read_with_patience(self, follower: Follower) -> None:
        """One successful read of the log. While Redis is away the reader waits: keep-alives hold its connection."""
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._settings.log_outage_s
        pause_s = 0.1
        while True:
            try:
                await self.attach(follower)
            except LogUnavailable:
                self._metrics.log_errors.labels("attach").inc()
                if loop.time() > give_up_at:
                    raise
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 2.0)
            else:
                return

    async def _catch_up(self, follower: Follower) -> Attached:
        async with self._read_slots:
            why = follower.gap or Gap.ATTACH
            self._metrics.catch_up_reads.labels(why).inc()
            if why is Gap.SLOW_READER:
                self._metrics.slow_readers.inc()
            after = follower.begin_read()
            try:
                attached = await self._reading.attach(
                    follower.request_id,
                    after=after,
                    edge_id=self._edge_id,
                    limit=self._settings.reader_buffer_events,
                )
                seen = attached.events[-1].n if attached.events else after
                follower.end_read(attached.events, complete=seen >= attached.last_n)
            finally:
                follower.abandon_read()
            return attached

    async def _detach(self, request_id: str) -> None:
        try:
            await self._reading.detach(request_id, self._edge_id)
        except (LogUnavailable, LogCorrupt):
            _log.debug("could not detach", request_id=request_id)  # frames go nowhere until the request ends
        for follower in self._followers.get(request_id, ()):  # somebody came back while we were leaving
            follower.mark_gap(Gap.ATTACH)

    def _start(self, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its reader may be gone: then nobody else looks at it
