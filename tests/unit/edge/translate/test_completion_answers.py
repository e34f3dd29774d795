"""Streamed and plain completions, from the same events."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion

from common.events import CancelReason, FinishReason
from edge.translate.responses import DONE
from tests.unit.edge.translate.answered import Log
from tests.unit.edge.translate.calls import completion

HEAD = (
    b'{"id":"cmpl-r1","object":"text_completion","created":1000,"model":"small",'
    b'"system_fingerprint":"fp_0123456789ab","choices":['
)
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """One choice of a stream as a client puts it together."""
    result: dict[str, Any] = {"text": "", "finish_reason": None, "token_ids": [], **{name: [] for name in LISTS}}
    for choice in (choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index):
        result["text"] += choice["text"]
        result["finish_reason"] = choice["finish_reason"] or result["finish_reason"]
        result["token_ids"] += choice.get("token_ids", [])
        for name in LISTS:
            result[name] += (choice["logprobs"] or {}).get(name, [])
    return result


def test_the_exact_bytes_of_a_stream() -> None:
    chunks = Log(completion(stream=True)).says(" a").finishes(FinishReason.LENGTH, text="!").ends().chunks()
    assert chunks == [
        HEAD + b'{"index":0,"text":" a","logprobs":null,"finish_reason":null}]}',
        HEAD + b'{"index":0,"text":"!","logprobs":null,"finish_reason":"length","stop_reason":null}]}',
        DONE,
    ]


@pytest.mark.parametrize("top", [0, 1, 3])
@pytest.mark.parametrize("echo", [True, False])
def test_stream_and_plain_answer_agree_with_lists_of_one_length(top: int, echo: bool) -> None:
    request = completion(
        prompt=["The é", "A"], n=2, logprobs=top, echo=echo, stream=True, return_token_ids=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    log = Log(request).scores(0).scores(1)
    for choice in range(4):
        log.says(" 漢", choice).says("b", choice, shown="").finishes(choice=choice, text="b")
    chunks, answer = log.ends().parsed(), log.answer()
    for choice in range(4):
        streamed, plain = joined(chunks, choice), answer["choices"][choice]
        prompt = ("The é", "A")[choice // 2] if echo else ""
        assert streamed["text"] == plain["text"] == prompt + " 漢b"
        assert streamed["token_ids"] == plain["token_ids"]
        assert plain["prompt_token_ids"] == list(request.prompts[choice // 2])
        assert {name: streamed[name] for name in LISTS} == plain["logprobs"]
        lists = plain["logprobs"]
        assert {len(lists[name]) for name in LISTS} == {5 + (len(request.prompts[choice // 2]) if echo else 0)}
        assert lists["text_offset"] == sorted(lists["text_offset"])
        assert (lists["token_logprobs"][0] is None) == echo
        assert all(len(entry) == max(1, top) for entry in lists["top_logprobs"] if entry)
    assert chunks[-1]["usage"] == answer["usage"]
    for chunk in chunks[:-1]:
        assert Completion.construct(**chunk).choices[0].text is not None
    if not echo:  # the SDK's type does not know that an echoed prompt's first token has no log probability
        Completion.model_validate(answer)


def test_scoring_a_prompt_shows_no_output() -> None:
    log = Log(completion(prompt="abc", max_tokens=0, echo=True, logprobs=1, stream=True)).scores()
    log.says("x").finishes(FinishReason.LENGTH, text="y").ends()
    plain, streamed = log.answer()["choices"][0], joined(log.parsed())
    assert plain["text"] == streamed["text"] == "abc"
    assert plain["logprobs"]["tokens"] == streamed["tokens"] == ["a", "b", "c"]
    assert log.answer()["usage"]["completion_tokens"] == 1


def test_echo_is_shown_even_if_nothing_follows() -> None:
    log = Log(completion(prompt="abc", echo=True, stream=True)).finishes().ends()
    assert log.answer()["choices"][0]["text"] == joined(log.parsed())["text"] == "abc"


def test_running_usage_is_that_of_the_choice() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    log = Log(completion(prompt=[[7, 8], [9]], stream=True, stream_options=options)).says("ab", 1).says("c", 0)
    chunks = log.finishes(choice=0).finishes(choice=1).ends().parsed()
    counts = [(chunk["usage"]["prompt_tokens"], chunk["usage"]["completion_tokens"]) for chunk in chunks]
    assert counts == [(1, 2), (2, 1), (2, 1), (1, 2), (3, 3)]


def test_prompt_logprobs_stand_beside_each_choice() -> None:
    log = Log(completion(prompt=["ab", "cd"], prompt_logprobs=0)).scores(0).scores(1)
    answer = log.finishes(choice=0).finishes(choice=1).ends().answer()
    assert [choice["prompt_logprobs"][0] for choice in answer["choices"]] == [None, None]
    assert [next(iter(choice["prompt_logprobs"][1].values()))["decoded_token"] for choice in answer["choices"]] == [
        "b",
        "d",
    ]


def test_a_cancelled_choice_is_an_abort() -> None:
    log = Log(completion(stream=True)).says("a").ends(CancelReason.ORPHANED)
    assert joined(log.parsed())["finish_reason"] == log.answer()["choices"][0]["finish_reason"] == "abort"
