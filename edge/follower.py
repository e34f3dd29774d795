"""The position of one reader in one request's log: what to keep, what to drop, when the log has to be read.

No I/O and no clock: frames are offered, reads of the log are begun and ended, and kept events are taken, in order::

        1 2 3 4 5 | 6 7 8 | 9
        taken       kept    next: the number that the next frame must have to be kept

A frame with that number is the next event, whatever is in doubt behind it; only one beyond it has to be read for.
"""

from __future__ import annotations

import asyncio
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from common.errors import LogCorrupt, StreamGap
from common.events import TERMINAL, Ended, Failed, Milestone, Recorded, Started, decode_output
from edge.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_MAY_OPEN_AN_EPOCH: Final = (Started, Milestone, Ended, Failed)


class Gap(StrEnum):
    """Why a reader has to look into the log. The values are labels of a metric."""

    ATTACH = "attach"  # it joins a request that runs already
    MISSING = "gap"  # a number was left out, or the last read did not reach the end
    QUIET = "quiet"  # nothing was heard for a while
    SLOW_READER = "slow_reader"  # its buffer was full
    RESUBSCRIBED = "resubscribed"  # the edge's subscription is new


class Follower:
    """One reader of one request, used from the event loop only.

    ``gap`` says why the log has to be read before more can be shown; None: frames tell everything.
    ``direct``, while it is set, is called by `flush` in place of waking the reader: it takes what is kept, or calls
    `wake`.
    """

    __slots__ = (
        "_aside",
        "_bytes",
        "_capacity",
        "_changed",
        "_epoch",
        "_interrupted",
        "_interruption",
        "_kept",
        "_next",
        "_tally",
        "direct",
        "gap",
        "is_ended",
        "may_be_handed_over",
        "quiet_checks",
        "quiet_ticks",
        "request_id",
    )

    def __init__(
        self, request_id: str, *, after: int, capacity: int, gap: Gap | None, tally: Tally | None = None
    ) -> None:
        self.request_id = request_id
        self.gap = gap
        self.direct: Callable[[], None] | None = None
        self.is_ended = False  # the terminal event has been taken
        self.may_be_handed_over = False  # its client can go on at another edge
        self.quiet_ticks = 0  # of the relay's clock since the last news
        self.quiet_checks = 0  # reads of the log since then: they become rarer
        self._capacity = capacity
        self._tally = tally or Tally()
        self._bytes = 0  # of frames that are kept or aside, as counted in the tally
        self._next = after + 1
        self._kept: list[tuple[int, bytes] | Recorded] = []
        self._aside: list[tuple[int, bytes]] | None = None  # frames that come while the log is being read
        self._epoch = 0
        self._interruption: Exception | None = None
        self._changed = asyncio.Event()
        self._interrupted = asyncio.Event()

    @property
    def position(self) -> int:
        """Number of the last event kept."""
        return self._next - 1

    @property
    def num_kept(self) -> int:
        """Events waiting for the reader; bounded by the capacity, and a page of the log on top of it."""
        return len(self._kept)

    @property
    def is_interrupted(self) -> bool:
        return self._interruption is not None

    def offer(self, n: int, payload: bytes) -> None:
        """A frame has come; `flush` after the last one that came with it."""
        self.quiet_ticks = self.quiet_checks = 0
        if self._aside is not None:
            if len(self._aside) < self._capacity and self._counts(payload):
                self._aside.append((n, payload))
        elif n == self._next:
            if len(self._kept) >= self._capacity or not self._counts(payload):
                self.mark_gap(Gap.SLOW_READER)
                return
            self._kept.append((n, payload))
            self._next += 1
            if self.gap is Gap.QUIET:  # nothing was missed: it was merely quiet
                self.gap = None
        elif n > self._next:
            self.mark_gap(Gap.MISSING)

    def flush(self) -> None:
        """What is kept goes to the reader now."""
        if not self._kept:
            return
        if self.direct is None or self._interruption is not None:
            self._changed.set()
        else:
            self.direct()

    def wake(self) -> None:
        """The reader shall look at what is kept by itself."""
        self._changed.set()

    def put_back(self, taken: list[Recorded]) -> None:
        """What `take` gave and nobody could use is kept again, for the reader itself."""
        self._kept[:0] = taken
        self._changed.set()

    def mark_gap(self, why: Gap) -> None:
        """The log has to be read before more is shown."""
        if not self.is_ended:
            self.gap = self.gap or why
            self._changed.set()

    def begin_read(self) -> int:
        """The log is going to be read after the returned number; frames are put aside meanwhile."""
        self._aside = []
        return self.position

    def end_read(self, events: Iterable[Recorded], *, complete: bool) -> None:
        """What the log holds from the position on; not ``complete`` means that there is more to read.

        Raises `StreamGap` when ``events`` do not follow the position.
        """
        aside = self._not_aside()
        for recorded in events:
            if recorded.n != self._next:
                raise StreamGap(expected=self._next, got=recorded.n)
            self._kept.append(recorded)
            self._next += 1
            self.quiet_checks = 0
        self.gap = None if complete else Gap.MISSING
        for n, payload in aside:
            self.offer(n, payload)
        self._changed.set()

    def abandon_read(self) -> None:
        """The read is over; when it has failed the gap remains. No-op after `end_read`."""
        self._not_aside()

    def drop(self) -> None:
        """The reader is gone, and with it what is kept for it."""
        self._kept, self._aside = [], None
        self._uncount(self._bytes)

    def take(self) -> list[Recorded]:
        """Everything kept, in order. Raises `UnknownEvent`, and `LogCorrupt` when the log was rewritten behind us."""
        kept, self._kept = self._kept, []
        self._uncount(self._bytes if self._aside is None else _bytes_of(kept))
        self._changed.clear()
        taken = [item if isinstance(item, Recorded) else Recorded(item[0], decode_output(item[1])) for item in kept]
        for recorded in taken:
            self._check(recorded)
        return taken

    def interrupt(self, why: Exception) -> None:
        """The reader has to stop: `changed` raises ``why`` from now on."""
        self._interruption = why
        self._interrupted.set()
        self._changed.set()

    async def interrupted(self) -> None:
        """Waits until `changed` raises what `interrupt` was given."""
        await self._interrupted.wait()

    async def changed(self) -> None:
        """Waits until something is kept or there is a gap. Raises what `interrupt` was given."""
        if not (self._kept or self.gap or self._interruption):
            await self._changed.wait()
        if self._interruption is not None:
            raise self._interruption

    def _counts(self, payload: bytes) -> bool:
        if not self._tally.take(len(payload)):
            return False
        self._bytes += len(payload)
        return True

    def _uncount(self, size: int) -> None:
        self._bytes -= size
        self._tally.give(size)

    def _not_aside(self) -> list[tuple[int, bytes]]:
        aside, self._aside = self._aside or [], None
        self._uncount(_bytes_of(aside))
        return aside

    def _check(self, recorded: Recorded) -> None:
        """A worker opens its epoch with `Started`. An epoch that opens otherwise had its start at a number that this
        reader has already seen with another content: a failover lost the log's tail, and it was written anew."""
        event = recorded.event
        if event.epoch > self._epoch:
            if recorded.n > 1 and self._epoch and not isinstance(event, _MAY_OPEN_AN_EPOCH):
                raise LogCorrupt(f"event {recorded.n} continues another history")
            self._epoch = event.epoch
        if isinstance(event, TERMINAL):
            self.is_ended = True


def _bytes_of(items: Iterable[tuple[int, bytes] | Recorded]) -> int:
    """Of frames; what was read from the log is not counted, since a reader that takes it has asked for it."""
    return sum(len(item[1]) for item in items if not isinstance(item, Recorded))
