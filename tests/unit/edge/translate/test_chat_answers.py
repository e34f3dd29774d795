"""Streamed and plain chats, from the same events."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from common.errors import DeadlineExceeded, EngineError, HeadraceError, Quarantined, StreamGap
from common.events import CancelReason, Failed, FinishReason, Recorded
from edge.translate.responses import DONE, AnswerBuilder, StreamRenderer
from tests.unit.edge.served_models import DEEPSEEK, QWEN, byte_tokenizer, served
from tests.unit.edge.translate.answered import STARTED, Log, assembled
from tests.unit.edge.translate.calls import chat
from tests.unit.edge.translate.test_tools import TOOLS, hermes

USAGE = {"include_usage": True}
HEAD = (
    b'{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":1000,"model":"small",'
    b'"system_fingerprint":"fp_0123456789ab","choices":['
)


def test_the_exact_bytes_of_a_stream() -> None:
    log = Log(chat(stream=True, stream_options=USAGE))
    chunks = log.says("Hé", shown="H").says('"\n').finishes(stop="x").ends().chunks()
    assert chunks == [
        HEAD + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}',
        HEAD + b'{"index":0,"delta":{"content":"H"},"logprobs":null,"finish_reason":null}]}',
        HEAD + b'{"index":0,"delta":{"content":"\\"\\n"},"logprobs":null,"finish_reason":null}]}',
        HEAD + b'{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":"x"}]}',
        HEAD + b'],"usage":{"prompt_tokens":3,"completion_tokens":5,"total_tokens":8,'
        b'"prompt_tokens_details":{"cached_tokens":2}}}',
        DONE,
    ]


def test_nothing_is_shown_before_the_first_output_and_no_chunk_is_empty() -> None:
    renderer = StreamRenderer(chat(stream=True), byte_tokenizer())
    assert renderer.feed(Recorded(1, STARTED)) == []
    log = Log(chat(stream=True)).says("a", shown="").says("b", shown="ab").finishes().ends()
    deltas = [choice["delta"] for chunk in log.parsed() for choice in chunk["choices"]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "ab"}, {}]


def test_every_choice_has_a_role_first_and_one_finish_last() -> None:
    log = Log(chat(n=3, stream=True)).says("a", 1).says("b", 0).finishes(choice=1).says("c", 2).says("d", 0)
    log.finishes(FinishReason.LENGTH, 0).finishes(choice=2, text="held").ends()
    chunks = log.parsed()
    assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 2]
    texts = [(assembled(chunks, i)["content"], assembled(chunks, i)["finish_reason"]) for i in range(3)]
    assert texts == [("bd", "length"), ("a", "stop"), ("cheld", "stop")]
    answer = log.answer()
    assert [(c["message"]["content"], c["finish_reason"]) for c in answer["choices"]] == texts
    assert not any("usage" in chunk for chunk in chunks)


def full_request(**fields: Any) -> Log:
    request = chat(
        served(QWEN), tools=TOOLS, logprobs=True, top_logprobs=3, return_token_ids=True, seed=1,
        stream_options={"include_usage": True, "continuous_usage_stats": True}, stream=True, **fields
    )  # fmt: skip
    log = Log(request)
    text = (
        "<think>\nhm, so\n</think>\n\nOn it.\n"
        + hermes("get_weather", '{"city": "北京🌧"}')
        + "\n"
        + hermes("list_all", "{}")
    )
    for at in range(0, len(text), 7):
        log.says(text[at : at + 7])
    return log.finishes().ends()


def test_stream_and_plain_answer_agree_on_everything() -> None:
    log = full_request()
    chunks, answer = log.parsed(), log.answer()
    streamed, plain = assembled(chunks), answer["choices"][0]
    message = plain["message"]
    assert (streamed["content"], streamed["reasoning"]) == (message["content"], message["reasoning"])
    assert (message["content"], message["reasoning"]) == ("On it.", "hm, so")
    assert message["reasoning_content"] == message["reasoning"]
    assert streamed["calls"] == message["tool_calls"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "list_all"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "北京🌧"}
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert (streamed["finish_reason"], plain["finish_reason"]) == ("tool_calls", "tool_calls")
    assert streamed["logprobs"] == plain["logprobs"]["content"]
    assert streamed["token_ids"] == plain["token_ids"]
    assert len(plain["logprobs"]["content"]) == answer["usage"]["completion_tokens"] == log.counted
    assert chunks[-1]["usage"] == answer["usage"]
    assert chunks[-1]["choices"] == []
    assert 0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < log.counted
    assert chunks[0]["prompt_token_ids"] == answer["prompt_token_ids"] == list(log.request.prompts[0])


def test_running_usage_counts_up_to_the_whole() -> None:
    log = full_request()
    counts = [chunk["usage"]["completion_tokens"] for chunk in log.parsed()]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == log.counted


def test_logprobs_are_finite_sorted_and_spell_the_text() -> None:
    entries = full_request().answer()["choices"][0]["logprobs"]["content"]
    for entry in entries:
        tops = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(tops) == 3
        assert tops == sorted(tops, reverse=True)
        assert tops[-1] == -9999.0
    assert "北京🌧" in b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert any(entry["token"].startswith("bytes:\\x") for entry in entries)


@pytest.mark.parametrize("after", range(1, 30))
def test_a_stream_taken_up_in_the_middle_goes_on_exactly(after: int) -> None:
    log = full_request()
    renderer = StreamRenderer(log.request, log.tokenizer)
    later = [chunk for r in log.recorded() for chunk in renderer.feed(r) if r.n > after]
    assert log.chunks(after) == later


def test_the_openai_sdk_reads_what_is_rendered() -> None:
    for log in (full_request(), Log(chat(n=2, stream=True)).says("a").finishes().finishes(choice=1).ends()):
        for chunk in log.parsed():
            ChatCompletionChunk.model_validate(chunk, strict=True)
        completion = ChatCompletion.model_validate(log.answer(), strict=True)
        assert completion.usage is not None
        assert completion.usage.prompt_tokens_details is not None
        assert completion.usage.prompt_tokens_details.cached_tokens == 2


def test_a_cut_call_is_length_in_both_forms() -> None:
    log = Log(chat(served(QWEN), tools=TOOLS, stream=True, reasoning_effort="none"))
    log.says(hermes("get_weather", '{"city": "Paris"}')[:53]).finishes(FinishReason.LENGTH).ends()
    streamed, plain = assembled(log.parsed()), log.answer()["choices"][0]
    assert streamed["finish_reason"] == plain["finish_reason"] == "length"
    assert streamed["content"] == ""
    assert plain["message"]["content"] is None
    assert streamed["calls"] == plain["message"]["tool_calls"]
    assert plain["message"]["tool_calls"][0]["function"]["arguments"] == '{"ci'


def test_a_call_that_the_model_broke_off_is_no_usable_call() -> None:
    log = Log(chat(served(QWEN), tools=TOOLS, reasoning_effort="none"))
    log.says(hermes("get_weather", '{"city": "Paris"}')[:50]).finishes().ends()
    assert log.answer()["choices"][0]["finish_reason"] == "stop"


def test_a_forced_call_has_empty_content_and_a_named_one_stops() -> None:
    named = {"type": "function", "function": {"name": "list_all"}}
    for choice, reason in (("required", "tool_calls"), (named, "stop")):
        request = chat(served(QWEN), tools=TOOLS, tool_choice=choice, reasoning_effort="none")
        answer = Log(request).says(hermes("list_all", "{}")).finishes().ends().answer()["choices"][0]
        assert (answer["finish_reason"], answer["message"]["content"]) == (reason, "")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "list_all"}}])
def test_a_forced_call_that_is_cut_before_its_name_leaves_nothing_in_both_forms(choice: Any) -> None:
    begun = hermes("list_all", "{}")[:16]
    log = Log(chat(served(QWEN), tools=TOOLS, tool_choice=choice, stream=True, reasoning_effort="none"))
    log.says(begun[:9]).says(begun[9:]).finishes(FinishReason.LENGTH).ends()
    streamed, plain = assembled(log.parsed()), log.answer()["choices"][0]
    assert streamed["content"] == plain["message"]["content"] == ""
    assert "tool_calls" not in plain["message"]
    assert not streamed["calls"]
    assert streamed["finish_reason"] == plain["finish_reason"] == "length"


def test_without_calls_there_is_no_key_for_them() -> None:
    message = Log(chat(served(QWEN), tools=TOOLS)).says("hi").finishes().ends().answer()["choices"][0]["message"]
    assert "tool_calls" not in message
    assert "reasoning" not in message
    assert message["content"] == "hi"


def test_reasoning_can_be_left_out_with_all_that_would_show_it() -> None:
    log = full_request(include_reasoning=False)
    message = log.answer()["choices"][0]["message"]
    assert "reasoning" not in message
    assert message["content"] == "On it."
    assert assembled(log.parsed())["logprobs"] == []
    assert assembled(log.parsed())["reasoning"] == ""


def test_reasoning_that_never_ends_leaves_the_content_empty() -> None:
    message = Log(chat(served(DEEPSEEK))).says("hm").finishes(FinishReason.LENGTH).ends().answer()["choices"][0]
    assert (message["message"]["content"], message["message"]["reasoning"]) == ("", "hm")


def test_echo_comes_first() -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1,"}]
    log = Log(chat(messages=messages, continue_final_message=True, echo=True, stream=True)).says(" 2").finishes().ends()
    assert assembled(log.parsed())["content"] == log.answer()["choices"][0]["message"]["content"] == "1, 2"


def test_prompt_logprobs_are_shown_by_token_id() -> None:
    log = Log(chat(prompt_logprobs=2)).scores().says("a").finishes().ends()
    shown = log.answer()["prompt_logprobs"]
    prompt = log.request.prompts[0]
    assert len(shown) == len(prompt)
    assert shown[0] is None
    assert shown[1][str(prompt[1])] == {"logprob": -0.5, "rank": 1, "decoded_token": "user"[0]}
    assert "prompt_logprobs" not in Log(chat()).says("a").finishes().ends().answer()


def test_tokens_can_be_written_as_ids() -> None:
    log = Log(chat(logprobs=True, return_tokens_as_token_ids=True)).says("a").finishes().ends()
    token_id = byte_tokenizer().encode("a")[0]
    assert log.answer()["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{token_id}"


@pytest.mark.parametrize(
    ("code", "kind"), [("engine_error", EngineError), ("quarantined", Quarantined), ("never_heard_of", EngineError)]
)
def test_a_failure_is_an_error_in_either_form(code: str, kind: type[HeadraceError]) -> None:
    for log in (Log(chat(stream=True)).fails(code), Log(chat(stream=True)).says("a").fails(code)):
        *before, error, done = log.chunks()
        assert done == DONE
        assert set(json.loads(error)["error"]) == {"message", "type", "param", "code"}
        assert not any(json.loads(chunk)["choices"][0]["finish_reason"] for chunk in before)
        with pytest.raises(kind):
            log.answer()


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_deadline_is_an_error_and_any_other_cancel_an_abort(is_finished: bool) -> None:
    def cancelled(reason: CancelReason) -> Log:
        log = Log(chat(stream=True, n=2)).says("a").finishes(choice=1)
        return (log.finishes(FinishReason.CANCELLED) if is_finished else log).ends(reason)

    late = cancelled(CancelReason.DEADLINE)
    assert json.loads(late.chunks()[-2])["error"]["code"] == "deadline_exceeded"
    with pytest.raises(DeadlineExceeded):
        late.answer()
    stopped = cancelled(CancelReason.API)
    assert assembled(stopped.parsed())["finish_reason"] == "abort"
    assert [choice["finish_reason"] for choice in stopped.answer()["choices"]] == ["abort", "stop"]


def test_a_gap_in_the_log_is_never_passed_over() -> None:
    log = Log(chat()).says("a")
    for reader in (StreamRenderer(log.request, log.tokenizer), AnswerBuilder(log.request, log.tokenizer)):
        reader.feed(log.recorded()[0])
        with pytest.raises(StreamGap):
            reader.feed(Recorded(3, Failed(epoch=1, t=1.0, code="x", message="y")))
