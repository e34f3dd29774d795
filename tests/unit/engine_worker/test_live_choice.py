"""One choice: what is shown, what is held back, what ends it."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from common.events import FinishReason, SamplingParams, TokenLogprobs
from engine_worker.live_choice import LiveChoice
from tests.unit.engine_worker.text_world import fake_tokenizer


def make(**sampling: Any) -> LiveChoice:
    params = SamplingParams(**{"max_tokens": 100, **sampling})
    return LiveChoice(0, params, fake_tokenizer().detokenizer())


def ids(text: str) -> list[int]:
    return list(text.encode())  # the first 256 ids are the bytes


def feed(choice: LiveChoice, text: str) -> tuple[str, int]:
    """(text shown, tokens taken until the choice ended or the text did)."""
    for token_id in ids(text):
        if choice.take(token_id):
            break
    event = choice.tokens_event(1, 0.0)
    assert event is not None
    return event.text, len(event.token_ids)


def test_the_token_that_completes_a_stop_string_is_the_last() -> None:
    choice = make(stop=("END",))
    assert feed(choice, "well END of it") == ("well ", len("well END"))
    assert (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, "END")
    assert choice.num_tokens == len("well END")
    assert choice.finished_event(1, 0.0).text == ""


def test_held_text_comes_with_the_end() -> None:
    choice = make(stop=("END",))
    assert feed(choice, "this is the EN")[0] == "this is the "
    choice.finish(FinishReason.LENGTH)
    assert choice.finished_event(1, 0.0).text == "EN"


def test_a_stop_token_is_counted_but_not_shown() -> None:
    choice = make()
    choice.take(ids("a")[0])
    choice.take(ids("b")[0], is_stop_token=True)
    event = choice.tokens_event(1, 0.0)
    assert event is not None
    assert (event.text, event.token_ids) == ("a", tuple(ids("ab")))


def test_a_stop_token_is_shown_when_asked_for() -> None:
    choice = make(include_stop_str_in_output=True)
    choice.take(ids("b")[0], is_stop_token=True)
    event = choice.tokens_event(1, 0.0)
    assert event is not None
    assert event.text == "b"


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    choice = make(stop=("ab",), min_tokens=4)
    assert feed(choice, "ababab")[0] == "abab"
    assert choice.stop_reason == "ab"
    assert choice.num_tokens == 6


def test_the_first_ending_wins() -> None:
    choice = make(stop=("x",))
    feed(choice, "x")
    choice.finish(FinishReason.LENGTH)
    assert choice.finish_reason is FinishReason.STOP


def test_events_carry_what_came_since_the_last_one() -> None:
    choice = make()
    choice.note_cached(7)
    choice.take(ids("a")[0], TokenLogprobs(logprob=-1.0))
    first = choice.tokens_event(3, 5.0)
    choice.take(ids("b")[0], TokenLogprobs(logprob=-2.0))
    second = choice.tokens_event(3, 6.0)
    assert first is not None
    assert second is not None
    assert (first.text, first.cached_tokens, first.epoch, first.t) == ("a", 7, 3, 5.0)
    assert (second.text, second.cached_tokens, second.logprobs) == ("b", 0, (TokenLogprobs(logprob=-2.0),))
    assert choice.tokens_event(3, 7.0) is None


@given(st.lists(st.integers(0, 999), max_size=40), st.sets(st.integers(1, 40)))
def test_text_does_not_depend_on_how_tokens_are_coalesced(token_ids: list[int], cuts: set[int]) -> None:
    stops = ("b c", "é🦊", "x")
    whole, cut = make(stop=stops), make(stop=stops)
    parts = []
    for i, token_id in enumerate(token_ids, start=1):
        ended = whole.take(token_id)
        assert cut.take(token_id) == ended
        if i in cuts and (event := cut.tokens_event(1, 0.0)) is not None:
            parts.append(event)
        if ended:
            break
    for choice in (whole, cut):
        choice.finish(FinishReason.LENGTH)
    expected, last = whole.tokens_event(1, 0.0), cut.tokens_event(1, 0.0)
    parts += [last] if last is not None else []
    assert "".join(part.text for part in parts) == (expected.text if expected else "")
    assert whole.finished_event(1, 0.0) == cut.finished_event(1, 0.0)
