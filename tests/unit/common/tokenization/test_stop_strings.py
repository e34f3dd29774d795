"""Stop strings over every cut of a text: withheld, exact, earliest end first."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tokenization.stop_strings import StopStringMatcher


def run(pieces: list[str], stops: tuple[str, ...], *, include: bool = False) -> tuple[str, str | None, int | None]:
    """(text shown, stop string, index of the piece that completed it)."""
    matcher = StopStringMatcher(stops, include_stop=include)
    shown = ""
    for i, piece in enumerate(pieces):
        match = matcher.feed(piece)
        shown += match.text
        if match.stop is not None:
            return shown, match.stop, i
    return shown + matcher.flush(), None, None


def reference(text: str, stops: tuple[str, ...], *, include: bool = False) -> tuple[str, str | None]:
    """The text up to the stop string that is complete first; the longest of those that end together."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if stop and text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def every_cut(text: str) -> list[list[str]]:
    cuts = range(1, len(text))
    chosen = [c for size in range(len(text)) for c in combinations(cuts, size)]
    return [[text[a:b] for a, b in zip((0, *c), (*c, len(text)), strict=True)] for c in chosen]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stops", [("ab",), ("bab", "abb"), ("aab", "b"), ("🦊",), ("abba🦊",), ("zz", "a🦊")])
def test_every_cut_of_a_text_gives_the_same_outcome(stops: tuple[str, ...], include: bool) -> None:
    text = "aababba🦊b"
    expected = reference(text, stops, include=include)
    for pieces in every_cut(text):
        assert run(pieces, stops, include=include)[:2] == expected


@given(
    st.lists(st.text("ab\n", max_size=4), max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4).map(tuple),
    st.booleans(),
)
def test_any_pieces_and_stops_match_the_plain_search(pieces: list[str], stops: tuple[str, ...], include: bool) -> None:
    shown, stop, index = run(pieces, stops, include=include)
    assert (shown, stop) == reference("".join(pieces), stops, include=include)
    if index is not None:
        assert reference("".join(pieces[:index]), stops)[1] is None, "an earlier piece had completed it"


@given(st.lists(st.text("abc", max_size=3), max_size=10), st.text("abc", min_size=1, max_size=4))
def test_nothing_of_a_stop_string_is_ever_shown_early(pieces: list[str], stop: str) -> None:
    matcher = StopStringMatcher((stop,))
    shown = ""
    for piece in pieces:
        match = matcher.feed(piece)
        shown += match.text
        if match.stop is not None:
            break
        longest = max((k for k in range(len(stop)) if (shown + matcher.held).endswith(stop[:k])), default=0)
        assert len(matcher.held) == longest, "held exactly what could still become the stop string"
    assert stop not in shown


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert run(["one two three"], ("three", "two t"))[1] == "two t"
    assert run(["abc"], ("c", "bc", "abc"))[:2] == ("", "abc")


def test_text_without_a_stop_is_passed_through_whole() -> None:
    assert run(["Hel", "lo", "\n"], ("\n\n",)) == ("Hello\n", None, None)
    assert run(["a", ""], ("",)) == ("a", None, None)


def test_held_text_is_released_when_the_stop_does_not_come() -> None:
    matcher = StopStringMatcher(("###",))
    assert matcher.feed("a##").text == "a"
    assert matcher.held == "##"
    assert matcher.feed("b").text == "##b"
    assert matcher.feed("#").text == ""
    assert matcher.flush() == "#"
