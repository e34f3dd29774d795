"""What a reader keeps and drops: any order of frames and reads gives each event once, in order."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import LogCorrupt, ModelUnavailable, StreamGap
from common.events import Ended, OutputEvent, Recorded, Started, Tokens, Usage, encode
from edge.follower import Follower, Gap
from edge.tally import Tally

LENGTH = 12


def event(n: int, epoch: int = 1) -> OutputEvent:
    if n == 1:
        return Started(epoch=epoch, t=0.0, worker="w")
    if n == LENGTH:
        return Ended(epoch=epoch, t=0.0, usage=Usage())
    return Tokens(epoch=epoch, t=0.0, choice=0, token_ids=(n,), text=str(n))


LOG = [Recorded(n, event(n)) for n in range(1, LENGTH + 1)]


def follower(after: int = 0, capacity: int = 4, gap: Gap | None = None, tally: Tally | None = None) -> Follower:
    return Follower("r", after=after, capacity=capacity, gap=gap, tally=tally)


def offer(reader: Follower, *numbers: int) -> None:
    for n in numbers:
        reader.offer(n, encode(event(n)))


def read(reader: Follower, length: int, limit: int = LENGTH) -> None:
    """The log, ``length`` events long at this moment, read for ``reader``."""
    after = reader.begin_read()
    page = LOG[after : min(length, after + limit)]
    reader.end_read(page, complete=after + len(page) >= length)


def numbers(taken: list[Recorded]) -> list[int]:
    return [recorded.n for recorded in taken]


def test_frames_in_order_are_kept() -> None:
    reader = follower()
    offer(reader, 1, 2, 3)
    assert numbers(reader.take()) == [1, 2, 3]
    assert reader.gap is None


def test_repeated_frames_are_dropped() -> None:
    reader = follower()
    offer(reader, 1, 1, 2, 1, 2, 3)
    assert numbers(reader.take()) == [1, 2, 3]


def test_a_missing_number_is_a_gap_until_the_log_was_read() -> None:
    reader = follower()
    offer(reader, 1, 3, 4)
    assert (numbers(reader.take()), reader.gap) == ([1], Gap.MISSING)
    read(reader, 4)
    offer(reader, 5)
    assert (numbers(reader.take()), reader.gap) == ([2, 3, 4, 5], None)


def test_a_full_buffer_drops_frames_and_remembers() -> None:
    reader = follower(capacity=2)
    offer(reader, 1, 2, 3, 4)
    assert (reader.num_kept, reader.gap) == (2, Gap.SLOW_READER)
    assert numbers(reader.take()) == [1, 2]
    read(reader, 4)
    assert numbers(reader.take()) == [3, 4]


def test_frames_that_come_during_a_read_are_not_lost() -> None:
    reader = follower(gap=Gap.ATTACH)
    after = reader.begin_read()
    offer(reader, 2, 3)
    reader.end_read(LOG[after:2], complete=True)
    assert (numbers(reader.take()), reader.gap) == ([1, 2, 3], None)


def test_a_failed_read_leaves_the_gap() -> None:
    reader = follower(gap=Gap.ATTACH)
    reader.begin_read()
    reader.abandon_read()
    offer(reader, 2)
    assert (reader.take(), reader.gap) == ([], Gap.ATTACH)


def test_the_next_event_is_kept_whatever_is_in_doubt_and_ends_a_doubt_that_was_mere_silence() -> None:
    reader = follower(gap=Gap.ATTACH)
    offer(reader, 1, 2)
    assert (numbers(reader.take()), reader.gap) == ([1, 2], Gap.ATTACH)
    read(reader, 2)
    reader.mark_gap(Gap.QUIET)
    offer(reader, 3)
    assert (numbers(reader.take()), reader.gap) == ([3], None)


def test_a_log_with_a_hole_is_refused() -> None:
    reader = follower(gap=Gap.ATTACH)
    reader.begin_read()
    with pytest.raises(StreamGap):
        reader.end_read(LOG[1:3], complete=True)


def test_after_the_terminal_event_nothing_is_a_gap() -> None:
    reader = follower(capacity=LENGTH)
    offer(reader, *range(1, LENGTH + 1))
    reader.take()
    reader.mark_gap(Gap.QUIET)
    assert (reader.is_ended, reader.gap) == (True, None)


def test_a_history_written_anew_behind_the_reader_is_refused() -> None:
    reader = follower()
    offer(reader, 1, 2)
    reader.take()
    reader.offer(3, encode(event(3, epoch=2)))
    with pytest.raises(LogCorrupt, match="another history"):
        reader.take()


def test_a_successor_that_opens_its_epoch_is_followed() -> None:
    reader = follower()
    offer(reader, 1, 2)
    reader.offer(3, encode(Started(epoch=2, t=0.0, worker="v", resumed_from=2)))
    reader.offer(4, encode(event(4, epoch=2)))
    assert numbers(reader.take()) == [1, 2, 3, 4]


async def test_an_interrupted_reader_is_told_why() -> None:
    reader = follower()
    waiting = asyncio.ensure_future(reader.changed())
    await asyncio.sleep(0)
    reader.interrupt(ModelUnavailable("closing"))
    with pytest.raises(ModelUnavailable, match="closing"):
        await waiting


@given(st.lists(st.tuples(st.sampled_from(["frame", "take", "read", "half", "doubt"]), st.integers(1, LENGTH))))
def test_whatever_is_lost_or_late_each_event_is_taken_once_and_in_order(steps: list[tuple[str, int]]) -> None:
    reader = follower(capacity=3)
    taken: list[Recorded] = []
    length = 1  # of the log; frames only ever tell of what is in it
    for step, n in steps:
        length = max(length, n)
        match step:
            case "frame":
                offer(reader, n)
            case "take":
                taken += reader.take()
            case "read":
                read(reader, length)
            case "half":
                read(reader, length, limit=2)
            case _:
                reader.mark_gap(Gap.RESUBSCRIBED)
        assert reader.num_kept <= 3 + LENGTH
    taken += reader.take()
    while not reader.is_ended:
        reader.mark_gap(Gap.QUIET)
        read(reader, LENGTH, limit=5)
        taken += reader.take()
    assert taken == LOG


def test_what_is_kept_counts_until_it_is_taken_or_the_reader_has_gone() -> None:
    tally = Tally(10_000)
    first, second = follower(tally=tally), follower(tally=tally)
    offer(first, 1, 2)
    offer(second, 1)
    assert tally.held == sum(len(encode(event(n))) for n in (1, 2, 1))
    first.take()
    assert tally.held == len(encode(event(1)))
    second.drop()
    assert tally.held == 0


def test_over_the_tally_a_reader_goes_to_the_log_and_misses_nothing() -> None:
    tally = Tally(len(encode(event(1))) + len(encode(event(2))))
    reader = follower(capacity=100, tally=tally)
    offer(reader, 1, 2, 3, 4)
    assert reader.gap is Gap.SLOW_READER
    assert numbers(reader.take()) == [1, 2]
    assert tally.held == 0
    read(reader, length=LENGTH)
    assert numbers(reader.take()) == list(range(3, LENGTH + 1))
    assert tally.held == 0


def test_what_is_put_aside_during_a_read_counts_too_and_is_let_go_with_it() -> None:
    tally = Tally(10_000)
    reader = follower(gap=Gap.ATTACH, tally=tally)
    reader.begin_read()
    offer(reader, 3, 4)
    assert tally.held == sum(len(encode(event(n))) for n in (3, 4))
    reader.abandon_read()
    assert tally.held == 0
    read(reader, length=2)
    offer(reader, 3)
    reader.begin_read()
    offer(reader, 4)
    assert numbers(reader.take()) == [1, 2, 3]
    assert tally.held == len(encode(event(4)))
    reader.drop()
    assert tally.held == 0


def test_news_go_to_who_takes_them_directly_once_for_all_that_came_together() -> None:
    reader = follower()
    direct: list[list[int]] = []
    reader.direct = lambda: direct.append(numbers(reader.take()))
    for batch in ((1,), (2, 3), (3,)):
        offer(reader, *batch)
        reader.flush()
    assert (direct, reader.take()) == ([[1], [2, 3]], [])


async def test_what_nobody_took_directly_is_there_for_the_reader() -> None:
    reader = follower()
    reader.direct = lambda: reader.put_back(reader.take())
    waiting = asyncio.ensure_future(reader.changed())
    await asyncio.sleep(0)
    offer(reader, 1, 2)
    reader.flush()
    await waiting
    offer(reader, 3)
    assert numbers(reader.take()) == [1, 2, 3]


def test_a_reader_that_has_to_stop_gets_no_news() -> None:
    reader = follower()
    reader.direct = lambda: pytest.fail("it was interrupted")
    reader.interrupt(ModelUnavailable("closing"))
    offer(reader, 1)
    reader.flush()
