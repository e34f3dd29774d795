"""A successor goes on exactly where the log ends, wherever that is."""

from __future__ import annotations

import pytest

from common.errors import LogCorrupt, StreamGap, WeightsChanged
from common.events import (
    ChoiceFinished,
    Ended,
    FinishReason,
    OutputEvent,
    PromptScored,
    Recorded,
    Started,
    TokenLogprobs,
    Tokens,
    Usage,
)
from common.request_state import fold
from common.transport.records import Owned
from engine_worker.resume import Resumer
from tests.unit.engine_worker.text_world import Inside, fake_tokenizer, request, visible

LONG_PROMPT = tuple(range(100, 170))


async def recorded(engine_request) -> list[OutputEvent]:
    inside = Inside()
    inside.own(engine_request)
    await inside.run()
    return inside.log.streams[engine_request.request_id]


def of_choice(events: list[OutputEvent], index: int) -> list[OutputEvent]:
    return [event for event in visible(events) if getattr(event, "choice", None) == index]


@pytest.mark.parametrize(
    "engine_request",
    [
        pytest.param(request(), id="length"),
        pytest.param(request(prompt=LONG_PROMPT, max_tokens=40), id="several chunks"),
        pytest.param(request(n=3, max_tokens=9), id="choices"),
        pytest.param(request(prompts=((1, 2), (3, 4, 5), (6,)), n=2, max_tokens=5), id="prompts and choices"),
        pytest.param(request(max_tokens=60, stop=("b c", "🦊x", "字é")), id="stop strings"),
        pytest.param(request(max_tokens=60, stop=("a",), min_tokens=20), id="stop string after min_tokens"),
        pytest.param(request(max_tokens=60, stop=("a",), include_stop_str_in_output=True), id="stop string shown"),
        pytest.param(request(max_tokens=60, eos_token_ids=tuple(range(300, 330))), id="eos"),
        pytest.param(request(max_tokens=60, stop_token_ids=tuple(range(400, 440))), id="stop token"),
        pytest.param(request(prompt=LONG_PROMPT, max_tokens=4, prompt_logprobs=1), id="scored prompt"),
        pytest.param(request(max_tokens=200, prompt=LONG_PROMPT), id="context full"),
    ],
)
async def test_every_cut_of_a_stream_is_continued_with_the_same_events(engine_request) -> None:
    whole = await recorded(engine_request)
    for cut in range(len(whole)):
        successor = Inside()
        successor.own(engine_request, epoch=2, events=whole[:cut])
        await successor.run()
        stream = successor.log.streams[engine_request.request_id]
        for index in range(engine_request.num_choices):
            assert of_choice(stream, index) == of_choice(whole, index), f"cut after {cut}"
        assert visible(stream)[-1] == visible(whole)[-1], f"cut after {cut}"
        assert sorted(map(repr, visible(stream))) == sorted(map(repr, visible(whole)))
        fold([Recorded(n, event) for n, event in enumerate(stream, start=1)])


async def test_the_streamed_text_is_the_decoded_text() -> None:
    for prompt in range(1, 30):
        engine_request = request(prompt=(prompt, 5), max_tokens=30)
        events = await recorded(engine_request)
        state = fold([Recorded(n, event) for n, event in enumerate(events, start=1)])
        choice = state.choice(0)
        decoded = fake_tokenizer().decode(choice.token_ids)
        assert decoded.rstrip("\N{REPLACEMENT CHARACTER}") == choice.text.rstrip("\N{REPLACEMENT CHARACTER}")
        assert decoded.startswith(choice.text)
        assert state.usage == Usage(prompt_tokens=2, completion_tokens=30)


async def test_a_log_whose_choices_have_finished_is_merely_ended() -> None:
    engine_request = request(n=2, max_tokens=3)
    whole = await recorded(engine_request)
    inside = Inside()
    inside.own(engine_request, epoch=2, events=whole[:-1])
    await inside.run()
    added = inside.log.streams["0-r1"][len(whole) - 1 :]
    assert [type(event) for event in added] == [Started, Ended]
    assert added[1].usage == whole[-1].usage
    assert not inside.world.runner.plans, "nothing was computed"


async def test_tokens_that_complete_a_stop_string_end_the_choice_even_if_its_end_was_lost() -> None:
    engine_request = request(max_tokens=60, stop=("b c", "🦊x", "字é", "a"))
    whole = await recorded(engine_request)
    end = next(n for n, event in enumerate(whole) if isinstance(event, ChoiceFinished))
    assert whole[end].stop_reason in engine_request.sampling.stop
    inside = Inside()
    inside.own(engine_request, epoch=2, events=whole[:end])
    await inside.run()
    assert visible(inside.log.streams["0-r1"]) == visible(whole)
    assert not inside.world.runner.plans


def owned_with(*events: OutputEvent, first_n: int = 1) -> Owned:
    recorded_events = tuple(Recorded(n, event) for n, event in enumerate(events, start=first_n))
    return Owned(request(), 2, len(events), recorded_events, None, 1, 0.0)


def test_a_log_with_a_gap_is_not_continued() -> None:
    with pytest.raises(StreamGap):
        Inside().resumer.resume(owned_with(Started(epoch=1, t=0.0, worker="w"), first_n=2), 1.0)


@pytest.mark.parametrize(
    "events",
    [
        (Ended(epoch=1, t=0.0, usage=Usage()),),
        (
            ChoiceFinished(epoch=1, t=0.0, choice=0, finish_reason=FinishReason.STOP),
            Tokens(epoch=1, t=0.0, choice=0, token_ids=(1,)),
        ),
    ],
)
def test_a_log_that_breaks_its_rules_is_not_continued(events: tuple[OutputEvent, ...]) -> None:
    with pytest.raises(LogCorrupt):
        Inside().resumer.resume(owned_with(*events), 1.0)


async def test_a_scored_prompt_is_scored_once() -> None:
    engine_request = request(n=2, prompt=LONG_PROMPT, max_tokens=2, prompt_logprobs=0)
    whole = await recorded(engine_request)
    (scored,) = [event for event in whole if isinstance(event, PromptScored)]
    assert scored.logprobs[0] is None
    assert len(scored.logprobs) == len(LONG_PROMPT)
    assert all(isinstance(score, TokenLogprobs) for score in scored.logprobs[1:])


async def test_a_prompt_of_one_token_gets_its_empty_scores() -> None:
    events = await recorded(request(prompt=(5,), max_tokens=1, prompt_logprobs=0))
    assert [event.logprobs for event in events if isinstance(event, PromptScored)] == [(None,)]


def test_an_answer_begun_with_other_weights_is_not_continued() -> None:
    events = (
        Started(epoch=1, t=1.0, worker="old", weights_fingerprint="0123"),
        Tokens(epoch=1, t=1.1, choice=0, token_ids=(5,), text="x"),
    )
    owned = Owned(
        request(max_tokens=9), 2, 2, tuple(Recorded(n, event) for n, event in enumerate(events, start=1)), None, 0, 0.0
    )
    with pytest.raises(WeightsChanged, match="begun with weights 0123"):
        Resumer(fake_tokenizer(), "new", 100, iter(range(9)).__next__, "4567").resume(owned, now=2.0)
    resumed = Resumer(fake_tokenizer(), "same", 100, iter(range(9)).__next__, "0123").resume(owned, now=2.0)
    assert [sequence.output_token_ids() for sequence in resumed.sequences] == [(5,)]


async def test_a_request_that_has_no_token_yet_may_run_on_other_weights() -> None:
    inside = Inside()
    inside.own(request(max_tokens=3), epoch=2, events=[Started(epoch=1, t=1.0, worker="old", weights_fingerprint="a")])
    await inside.run()
    assert isinstance(inside.log.streams[request().request_id][-1], Ended)
