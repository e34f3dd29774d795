"""Conversations, the four forms of a prompt, and the context they have to fit into."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import ContextOverflow
from tests.unit.edge.served_models import CONTEXT, DEEPSEEK, QWEN, served
from tests.unit.edge.translate.calls import chat, completion, prompt_text, refusal, shown

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def history(**assistant: Any) -> list[dict[str, Any]]:
    return [
        user("Go."),
        {"role": "assistant", **assistant},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        user("On."),
    ]


REFUSED: list[tuple[list[Any], str]] = [
    ([], "messages"),
    ([{"content": "hi"}], "messages[0].role"),
    ([{"role": "banana", "content": "hi"}], "messages[0].role"),
    ([{"role": "", "content": "hi"}], "messages[0].role"),
    ([{"role": 5, "content": "hi"}], "messages[0].role"),
    ([user("a"), user(None)], "messages[1].content"),
    ([{"role": "system"}], "messages[0].content"),
    ([user(5)], "messages[0].content"),
    ([user({"a": 1})], "messages[0].content"),
    ([user([{"type": "image_url", "image_url": {"url": "data:,"}}])], "messages[0].content[0]"),
    ([user([{"type": "text", "text": "x"}, {"type": "input_audio"}])], "messages[0].content[1]"),
    ([user([{"type": "text"}])], "messages[0].content[0]"),
    ([user([{"type": 5, "text": "x"}])], "messages[0].content[0]"),
    ([user([5])], "messages[0].content[0]"),
    ([user("x"), {"role": "assistant", "tool_calls": "f"}], "messages[1].tool_calls"),
    ([user("x"), {"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages[1].tool_calls[0]"),
    ([user("x"), {"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[1].tool_calls[0].function.name"),
]


@pytest.mark.parametrize(("messages", "param"), REFUSED)
def test_a_message_that_makes_no_sense_is_refused_by_name(messages: list[Any], param: str) -> None:
    assert refusal(chat, messages=messages).param == param


def test_parts_are_flattened() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}, {"type": "refusal", "refusal": "c"}]
    assert chat(messages=[user(parts)]).prompts == chat(messages=[user("a bc")]).prompts


def test_developer_is_system_where_the_template_lacks_the_role() -> None:
    developer = chat(messages=[{"role": "developer", "content": "Be brief."}, user("hi")])
    assert developer.prompts == chat(messages=[{"role": "system", "content": "Be brief."}, user("hi")]).prompts
    knows = served(QWEN + "{# developer #}")
    assert "<|im_start|>developer" in prompt_text(chat(knows, messages=[{"role": "developer", "content": "x"}]))


def test_control_tokens_typed_by_a_client_stay_text() -> None:
    plain, typed = chat(messages=[user("a b")]), chat(messages=[user("a <|im_end|> b")])
    assert len(typed.prompts[0]) - len(plain.prompts[0]) == len("<|im_end|> ")
    assert completion(prompt="<|im_end|>").prompts == ((2,),)


@pytest.mark.parametrize("template", [QWEN, None])
@pytest.mark.parametrize(
    "arguments", ['{"path": "/tmp/x", "text": "He said ', '"Beijing"', '["Beijing"]', "null", "", None, {"a": 1}, "5"]
)
def test_earlier_calls_are_rendered_whatever_their_arguments(template: str | None, arguments: Any) -> None:
    model = served(template) if template else served()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert prompt_text(chat(model, messages=history(content=None, tool_calls=[call])), model).count("<|im_end|>") == 4


def test_an_empty_list_of_calls_changes_nothing() -> None:
    messages = [user("hi"), {"role": "assistant", "content": "Hello."}, user("Go on.")]
    with_empty = [messages[0], {**messages[1], "tool_calls": []}, messages[2]]
    assert chat(messages=messages).prompts == chat(messages=with_empty).prompts


def test_tools_are_described_as_text_where_the_template_knows_none() -> None:
    text = prompt_text(chat(messages=history(content="Well.", tool_calls=[CALL]), tools=[TOOL]))
    assert text.startswith("<|im_start|>system\n# Tools")
    assert '"name": "f"' in text
    assert 'Well.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\n42\n</tool_response>" in text
    with_system = prompt_text(chat(messages=[{"role": "system", "content": "Be kind."}, user("x")], tools=[TOOL]))
    assert with_system.startswith("<|im_start|>system\nBe kind.\n\n# Tools")
    assert with_system.count("<|im_start|>system") == 1


def test_a_template_with_tools_renders_them_itself() -> None:
    model = served(QWEN)
    text = prompt_text(chat(model, tools=[TOOL], messages=history(tool_calls=[CALL])), model)
    assert text.startswith("<|im_start|>system\n<tools>{")
    assert "a=1;" in text
    assert "<tools>" not in prompt_text(chat(model, tools=[TOOL], tool_choice="none"), model)


def test_the_final_message_can_be_continued() -> None:
    messages = [user("Count."), {"role": "assistant", "content": "1, 2,"}]
    text = prompt_text(chat(messages=messages, continue_final_message=True))
    assert text.endswith("<|im_start|>assistant\n1, 2,")
    echoed = chat(messages=messages, continue_final_message=True, add_generation_prompt=False, echo=True)
    assert shown(echoed).echo == "1, 2,"
    assert prompt_text(chat(add_generation_prompt=False)).endswith("hi<|im_end|>\n")


def test_reasoning_effort_and_template_variables_reach_the_template() -> None:
    model = served(QWEN)
    assert prompt_text(chat(model, reasoning_effort="none"), model).endswith("</think>\n\n")
    assert prompt_text(chat(model, chat_template_kwargs={"enable_thinking": False}), model).endswith("</think>\n\n")
    both = chat(model, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True})
    assert prompt_text(both, model).endswith("assistant\n")
    assert [shown(r).reasoning_format for r in (chat(model), chat(model, reasoning_effort="none"))] == ["think", ""]
    opened = chat(served(DEEPSEEK))
    assert (shown(opened).reasoning_format, shown(opened).in_reasoning) == ("think", True)


def test_a_model_without_a_template_refuses_chats() -> None:
    assert refusal(lambda: chat(served(""))).param == "messages"


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], ["a", ""], [[]], [[1], []], None, {"a": 1}, 5, [1, "a"], ["a", 1], [[1, "a"]], [[1.5]], [True],
     [-1], [5279552648203111001], [5, 9, 4294967295], [[-5]]],
)  # fmt: skip
def test_a_prompt_of_no_known_form_is_refused(prompt: Any) -> None:
    error = refusal(completion, prompt=prompt)
    assert error.param is not None
    assert error.param.startswith("prompt")
    assert "prompt" in error.message


def test_the_four_forms_of_a_prompt() -> None:
    ids = tuple(served().tokenizer.encode("hi"))
    assert completion(prompt="hi").prompts == (ids,)
    assert completion(prompt=["hi", "hi"], n=2).prompts == (ids, ids)
    assert completion(prompt=list(ids)).prompts == (ids,)
    assert completion(prompt=[[1, 2], [3]]).prompts == ((1, 2), (3,))
    assert completion(prompt=["hi", [3]]).prompts == (ids, (3,))


def test_prompts_times_n_are_bounded() -> None:
    assert refusal(completion, prompt=["a"] * 65, n=2).param == "n"
    assert refusal(completion, prompt=["a"] * 2000).param == "prompt"


@pytest.mark.parametrize("make", [lambda n: completion(prompt="x" * n), lambda n: chat(messages=[user("x" * n)])])
def test_a_prompt_over_the_context_is_refused_with_its_length(make: Any) -> None:
    with pytest.raises(ContextOverflow) as caught:
        make(CONTEXT)
    assert f"maximum context length is {CONTEXT} tokens" in caught.value.message
    assert caught.value.code == "context_length_exceeded"


def test_truncation_keeps_the_side_that_was_named() -> None:
    assert completion(prompt=[3, 4, 5], truncate_prompt_tokens=2).prompts == ((4, 5),)
    assert completion(prompt=[3, 4, 5], truncate_prompt_tokens=2, truncation_side="right").prompts == ((3, 4),)
    assert len(completion(prompt="x" * 9000, truncate_prompt_tokens=-1).prompts[0]) == CONTEXT - 1


def test_scoring_a_prompt_needs_echo() -> None:
    assert refusal(completion, max_tokens=0).param == "max_tokens"
    scored = completion(max_tokens=0, echo=True, logprobs=2)
    assert (scored.sampling.max_tokens, scored.sampling.prompt_logprobs) == (1, 2)
    assert shown(scored).hide_output
    assert shown(completion(prompt=[105, 106], echo=True)).echo_prompts == (served().tokenizer.decode([105, 106]),)


def test_suffix_and_best_of_are_refused_unless_they_change_nothing() -> None:
    assert refusal(completion, suffix="x").param == "suffix"
    assert refusal(completion, best_of=3).param == "best_of"
    assert completion(suffix="", best_of=2, n=2).n == 2
