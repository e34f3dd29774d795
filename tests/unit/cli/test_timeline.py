"""The timeline is a pure function of the events."""

from __future__ import annotations

import json

from cli.timeline import event_json, state_at, timeline
from common.events import (
    CancelReason,
    ChoiceFinished,
    Ended,
    EngineRequest,
    Failed,
    FinishReason,
    Milestone,
    OutputEvent,
    Recorded,
    SamplingParams,
    Started,
    TokenLogprobs,
    Tokens,
    Usage,
)

REQUEST = EngineRequest(
    request_id="0-0192", model="m", prompts=((1, 2, 3),), sampling=SamplingParams(max_tokens=8), arrival_s=100.0
)


def tokens(t: float, text: str, epoch: int = 1) -> Tokens:
    return Tokens(epoch=epoch, t=t, choice=0, token_ids=(7,), text=text)


def recorded(*events: OutputEvent) -> list[Recorded]:
    return [Recorded(n, event) for n, event in enumerate(events, 1)]


HISTORY = recorded(
    Started(epoch=1, t=100.1, worker="a", prompt_tokens=3, queue_s=0.1),
    Milestone(epoch=1, t=100.2, what="prefill_chunk", detail={"tokens": 2}),
    tokens(100.3, "One"),
    tokens(100.4, " two"),
    tokens(100.6, " three"),
    Started(epoch=2, t=102.0, worker="b", resumed_from=5),
    tokens(102.1, " four", epoch=2),
    ChoiceFinished(epoch=2, t=102.2, choice=0, finish_reason=FinishReason.STOP, stop_reason="END"),
    Ended(epoch=2, t=102.2, usage=Usage(prompt_tokens=3, completion_tokens=4)),
)


def texts(*, is_detailed: bool) -> list[str]:
    return [str(line) for line in timeline(REQUEST, HISTORY, 100.0, is_detailed=is_detailed)]


def test_a_run_of_tokens_is_one_line_and_a_failover_is_shown() -> None:
    lines = texts(is_detailed=False)
    assert len(lines) == 8
    assert "first token" in lines[2]
    assert "4-5" in lines[3]
    assert "decode: 2 tokens, 200.0 ms apart, longest pause 200 ms" in lines[3]
    assert "taken over by b under epoch 2, goes on after event 5" in lines[4]
    assert "finished: stop ('END')" in lines[6]
    assert lines[7].startswith("    +2.200s")
    assert "3 prompt tokens (0 cached), 4 completion tokens" in lines[7]


def test_a_handover_is_no_takeover_and_one_clock_tells_all_times() -> None:
    history = recorded(
        Started(epoch=1, t=100.1, worker="a", queue_s=0.1),
        Milestone(epoch=1, t=101.0, what="handed_over"),
        Started(epoch=3, t=102.0, worker="b", resumed_from=2),
        Started(epoch=4, t=105.0, worker="c", resumed_from=3),
    )
    first, _, handed, taken = timeline(REQUEST, history, 100.0, is_detailed=False)
    assert str(first).startswith("    +0.100s")
    assert first.text.endswith("0.100 s after its arrival")
    assert handed.text == "continued by b under epoch 3, goes on after event 2 (handed over)"
    assert taken.text == "taken over by c under epoch 4, goes on after event 3"


def test_every_event_is_a_line_when_detailed() -> None:
    assert len(texts(is_detailed=True)) == len(HISTORY)


def test_the_text_at_any_event() -> None:
    assert state_at(HISTORY, 4).choice(0).text == "One two"
    assert state_at(HISTORY, 99).choice(0).text == "One two three four"
    assert state_at(HISTORY, 0).choice(0).text == ""


def test_ends_that_are_no_finish() -> None:
    cancelled = Ended(epoch=1, t=101.0, usage=Usage(), cancelled=CancelReason.CLIENT_DISCONNECTED)
    failed = Failed(epoch=1, t=101.0, code="quarantined", message="taken over too often")
    for event, words in ((cancelled, "cancelled (client_disconnected)"), (failed, "failed: quarantined")):
        [line] = timeline(REQUEST, recorded(event), 100.0, is_detailed=False)
        assert words in line.text


def test_an_event_as_json_holds_all_its_fields() -> None:
    event = Tokens(
        epoch=1, t=101.5, choice=0, token_ids=(4, 5), text="é", logprobs=(TokenLogprobs(logprob=-0.5, top_ids=(4,)),)
    )
    body = json.loads(event_json(Recorded(3, event), 100.0))
    assert body["n"] == 3
    assert body["kind"] == "tokens"
    assert body["at_s"] == 1.5
    assert body["token_ids"] == [4, 5]
    assert body["text"] == "é"
    assert body["logprobs"][0]["logprob"] == -0.5
