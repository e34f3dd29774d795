"""Tools and tool_choice: refused by name, described, forced by a grammar in the model's own notation."""

from __future__ import annotations

from typing import Any

import pytest

from common.events import EngineRequest, FinishReason
from edge.parsers.parts import CallArguments, CallStarted
from edge.translate.choice_fold import ChoiceFold
from tests.unit.edge.served_models import DEEPSEEK, LLAMA, MISTRAL, QWEN, served
from tests.unit.edge.translate.calls import chat, refusal, shown
from tests.unit.edge.translate.test_constraints import accepts

WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "北京🌧"]}, "days": {"type": "integer"}},
    "required": ["city"],
}


def function(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    described = {"name": name, "description": "A tool."} | ({} if parameters is None else {"parameters": parameters})
    return {"type": "function", "function": {**described, **more}}


TOOLS = [function("get_weather", WEATHER, strict=True), function("list_all", {"type": "object", "properties": {}})]
NAMED = {"type": "function", "function": {"name": "list_all"}}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
    ({"tools": []}, "tools"),
    ({"tools": "f"}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"description": "x"}}]}, "tools[0].function.name"),
    ({"tools": [function("")]}, "tools[0].function.name"),
    ({"tools": [function("a\nb")]}, "tools[0].function.name"),
    ({"tools": [function("f"), function("f")]}, "tools"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
    ({"tools": [function("f", [])]}, "tools[0].function.parameters"),
    ({"tools": [function("f", {"type": "string"})]}, "tools[0].function.parameters"),
    ({"tools": [function("f", description=5)]}, "tools[0].function.description"),
    ({"tools": [function("f", strict="yes")]}, "tools[0].function.strict"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
    (
        {"tools": [function("f", {"type": "object", "not": {}}, strict=True)], "tool_choice": "required"},
        "tools[0].function.parameters",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_tools_that_make_no_sense_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(chat, **fields)
    assert error.param == param
    assert "tool" in error.message


def call(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes(name: str, arguments: str) -> str:
    return f"<tool_call>\n{call(name, arguments)}\n</tool_call>"


def forced(template: str = QWEN, **fields: Any) -> EngineRequest:
    return chat(served(template), tools=TOOLS, reasoning_effort="none", **fields)


def test_required_forces_calls_of_the_tools() -> None:
    grammar = forced(tool_choice="required").sampling.grammar
    paris = hermes("get_weather", '{"city": "Paris", "days": 3}')
    assert accepts(grammar, paris)
    assert accepts(grammar, paris + "\n" + hermes("list_all", "{}"))
    assert not accepts(grammar, "Hello")
    assert not accepts(grammar, hermes("other", "{}"))
    assert not accepts(grammar, hermes("get_weather", '"Paris"'))
    assert not accepts(grammar, hermes("list_all", '{"x": 1}'))
    single = forced(tool_choice="required", parallel_tool_calls=False).sampling.grammar
    assert accepts(single, paris)
    assert not accepts(single, paris + "\n" + paris)


def test_a_named_tool_is_called_once() -> None:
    grammar = forced(tool_choice=NAMED).sampling.grammar
    assert accepts(grammar, hermes("list_all", "{}"))
    assert not accepts(grammar, hermes("get_weather", '{"city": "Paris"}'))
    assert not accepts(grammar, hermes("list_all", "{}") * 2)


@pytest.mark.parametrize(
    ("template", "one", "two"),
    [
        (LLAMA, call("list_all", "{}", "parameters"), "; ".join([call("list_all", "{}", "parameters")] * 2)),
        (MISTRAL, f"[{call('list_all', '{}')}]", f"[{call('list_all', '{}')}, {call('list_all', '{}')}]"),
        (QWEN, hermes("list_all", "{}"), "\n".join([hermes("list_all", "{}")] * 2)),
    ],
)
def test_what_a_grammar_forces_is_what_the_parser_reads(template: str, one: str, two: str) -> None:
    for choice, text, calls in (("required", two, 2), ("required", one, 1), (NAMED, one, 1)):
        request = forced(template, tool_choice=choice)
        assert accepts(request.sampling.grammar, text)
        fold = ChoiceFold(shown(request))
        parts = [part for character in text for part in fold.tokens((1,), character)] + fold.finish("")
        assert sum(isinstance(part, CallStarted) for part in parts) == calls
        assert all(isinstance(part, CallStarted | CallArguments) for part in parts)
        assert fold.finish_reason(FinishReason.STOP) == ("stop" if choice is NAMED else "tool_calls")
        assert fold.finish_reason(FinishReason.LENGTH) == "length"


def test_a_strict_tool_keeps_free_calls_well_formed() -> None:
    grammar = forced().sampling.grammar
    assert accepts(grammar, "No tool is needed: 1 < 2.")
    assert accepts(grammar, "Let me see.\n" + hermes("get_weather", '{"city": "北京🌧"}') + "\nDone.")
    assert not accepts(grammar, hermes("get_weather", '{"city": "Rome"}'))
    assert chat(served(QWEN), tools=[TOOLS[1]]).sampling.grammar is None


def test_a_loose_schema_that_cannot_be_expressed_still_gives_objects() -> None:
    tools = [function("f", {"type": "object", "properties": {"a": {"not": {"type": "string"}}}})]
    grammar = chat(served(QWEN), tools=tools, tool_choice="required", reasoning_effort="none").sampling.grammar
    assert accepts(grammar, hermes("f", '{"a": [1]}'))
    assert not accepts(grammar, hermes("f", "[1]"))


@pytest.mark.parametrize("template", [QWEN, LLAMA])
def test_tools_beside_a_response_format_leave_the_choice_between_both(template: str) -> None:
    kept = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "items": {"enum": [1]}}}}
    grammar = forced(template, response_format=kept).sampling.grammar
    assert accepts(grammar, "[1, 1]")
    one = call("list_all", "{}", "parameters") if template == LLAMA else hermes("list_all", "{}")
    assert accepts(grammar, one)
    assert not accepts(grammar, "Hello")
    thinking = chat(served(QWEN), tools=TOOLS, structured_outputs={"choice": ["yes"]}).sampling.grammar
    assert accepts(thinking, "<think>hm</think>\n\nyes")
    assert accepts(thinking, hermes("list_all", "{}"))


def test_calls_come_after_the_reasoning() -> None:
    request = chat(served(DEEPSEEK), tools=TOOLS, tool_choice="required")
    assert accepts(request.sampling.grammar, "I need <tool_call>.</think>\n\n" + hermes("list_all", "{}"))
    assert not accepts(request.sampling.grammar, hermes("list_all", "{}"))


def test_none_neither_shows_nor_parses_tools() -> None:
    request = forced(tool_choice="none")
    assert request.prompts == chat(served(QWEN), reasoning_effort="none").prompts
    assert (shown(request).tool_format, request.sampling.grammar) == ("", None)


def test_markup_of_special_tokens_is_not_skipped() -> None:
    assert not forced(MISTRAL).sampling.skip_special_tokens
    assert forced(QWEN).sampling.skip_special_tokens
    assert served(MISTRAL).tool_format == "mistral"
    assert served(LLAMA).tool_format == "llama3_json"


def test_parallel_calls_beyond_the_first_are_dropped() -> None:
    fold = ChoiceFold(shown(forced(parallel_tool_calls=False)))
    parts = fold.tokens((1,), "a" + hermes("list_all", "{}") * 2 + "b") + fold.finish("")
    assert sum(isinstance(part, CallStarted) for part in parts) == 1
