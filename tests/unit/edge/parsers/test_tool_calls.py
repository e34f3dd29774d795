"""The same calls for any chunking, and markup never in the content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.parsers.parts import CallArguments, CallStarted, Content, Part
from edge.parsers.tool_calls import HERMES, LLAMA3_JSON, MISTRAL, TOOL_FORMATS, tool_call_parser


@dataclass
class Answer:
    content: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name, arguments
    cut: bool = False


def collected(parts: Sequence[Part]) -> Answer:
    answer = Answer()
    for part in parts:
        match part:
            case Content(text):
                assert text
                answer.content += text
            case CallStarted(call, name):
                assert call == len(answer.calls)
                answer.calls.append([name, ""])
            case CallArguments(call, fragment):
                assert fragment
                assert call == len(answer.calls) - 1
                answer.calls[call][1] += fragment
            case _:
                pytest.fail(f"not a part of a call: {part}")
    return answer


def parsed(tool_format: str, chunks: Sequence[str], *, is_forced: bool = False) -> Answer:
    parser = tool_call_parser(tool_format, is_forced=is_forced)
    parts = [part for chunk in chunks for part in parser.feed(chunk)]
    answer = collected([*parts, *parser.finish()])
    answer.cut = parser.was_cut
    return answer


ONE = '<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"]{", "b": [1, {"c": null}]}}\n</tool_call>'
ARGS = '{"a": "x}\\"]{", "b": [1, {"c": null}]}'

CASES: list[tuple[str, str, str, list[list[str]]]] = [
    (HERMES, "just text", "just text", []),
    (HERMES, " text with a < b and <tool_box>\n", " text with a < b and <tool_box>\n", []),
    (HERMES, ONE, "", [["f", ARGS]]),
    (HERMES, "\n" + ONE + "\n", "", [["f", ARGS]]),
    (HERMES, "Let me see.\n" + ONE, "Let me see.", [["f", ARGS]]),
    (HERMES, ONE + "\n" + ONE, "", [["f", ARGS], ["f", ARGS]]),
    (HERMES, ONE + " and then", "and then", [["f", ARGS]]),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [["f", '{"a": 1}']]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [["f", "{}"]]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [["f", "{}"]]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', "", [["f", "{}"]]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [["f", '{"a": 1}']]),
    (
        HERMES,
        '<tool_call>{"name": "say", "arguments": {"t": "北京 🌧 ñ"}}</tool_call>',
        "",
        [["say", '{"t": "北京 🌧 ñ"}']],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": {"t": "</tool_call>"}}</tool_call>',
        "",
        [["f", '{"t": "</tool_call>"}']],
    ),
    (
        HERMES,
        '<tool_call>{"name": "a", "arguments": {}}\n{"name": "b", "arguments": {}}</tool_call>',
        "",
        [["a", "{}"], ["b", "{}"]],
    ),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}}', "", [["f", "{}"]]),
    (HERMES, "<tool_call>no json</tool_call>", "no json", []),
    (HERMES, '<tool_call>{"a": 1}</tool_call>', '{"a": 1}', []),
    (HERMES, "stray </tool_call> tag", "stray  tag", []),
    (LLAMA3_JSON, "just text {}", "just text {}", []),
    (LLAMA3_JSON, '{"name": "f", "parameters": {"a": 1}}', "", [["f", '{"a": 1}']]),
    (LLAMA3_JSON, ' \n{"name": "f", "arguments": {"a": 1}} ', "", [["f", '{"a": 1}']]),
    (LLAMA3_JSON, '<|python_tag|>{"name": "f", "parameters": {}}', "", [["f", "{}"]]),
    (
        LLAMA3_JSON,
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": 2}}',
        "",
        [["f", "{}"], ["g", '{"x": 2}']],
    ),
    (LLAMA3_JSON, '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    (LLAMA3_JSON, '{"broken', '{"broken', []),
    (LLAMA3_JSON, "{not json} at all", "{not json} at all", []),
    (MISTRAL, "just text [TOOL", "just text [TOOL", []),
    (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]', "", [["f", '{"a": 1}']]),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"x": [1]}}]',
        "",
        [["f", "{}"], ["g", '{"x": [1]}']],
    ),
    (MISTRAL, 'Hm. [TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[ARGS]{"b": {}}', "Hm.", [["f", '{"a": 1}'], ["g", '{"b": {}}']]),
]


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), CASES)
def test_calls_and_content_are_told_apart(tool_format: str, text: str, content: str, calls: list[list[str]]) -> None:
    whole = parsed(tool_format, [text])
    assert (whole.content, whole.calls) == (content, calls)
    assert parsed(tool_format, list(text)) == whole


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_cut_in_two_gives_the_same(case: tuple[str, str, str, list[list[str]]]) -> None:
    tool_format, text = case[:2]
    whole = parsed(tool_format, [text])
    for at in range(len(text)):
        assert parsed(tool_format, [text[:at], text[at:]]) == whole


def test_arguments_are_streamed_as_they_come() -> None:
    parser = tool_call_parser(HERMES)
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a"') == [
        CallStarted(0, "f"),
        CallArguments(0, '{"a"'),
    ]
    assert parser.feed(": 1") == [CallArguments(0, ": 1")]
    assert parser.feed("}}</tool_call>") == [CallArguments(0, "}")]


@pytest.mark.parametrize("at", range(len(ONE) - len("}\n</tool_call>")))
def test_a_cut_call_never_becomes_content_once_begun(at: int) -> None:
    answer = parsed(HERMES, list(ONE[:at]))
    assert "<tool_call>" not in answer.content
    assert answer.cut == bool(answer.calls)
    if answer.calls:
        assert answer.content == ""
        assert ARGS.startswith(answer.calls[0][1])


def test_a_forced_mistral_call_needs_no_marker() -> None:
    text = '[{"name": "f", "arguments": {"a": 1}}]'
    assert parsed(MISTRAL, list(text), is_forced=True).calls == [["f", '{"a": 1}']]
    assert parsed(MISTRAL, [text]).content == text


TWO: dict[str, str] = {
    HERMES: '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    LLAMA3_JSON: '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
    MISTRAL: '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
}


@pytest.mark.parametrize("prefix", ["", "[TOOL_CALLS]", "[TOOL_CALLS]f{}[TOOL_CALLS]"])
@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
def test_forced_calls_have_no_content_wherever_they_are_cut(tool_format: str, prefix: str) -> None:
    text = (prefix if tool_format == MISTRAL else "") + TWO[tool_format]
    for at in range(len(text) + 1):
        assert parsed(tool_format, list(text[:at]), is_forced=True).content == ""
        assert parsed(tool_format, [text[:at]], is_forced=True).content == ""


@pytest.mark.parametrize(
    ("tool_format", "text", "content"),
    [
        (HERMES, "See: <to", "See: <to"),
        (HERMES, "See:\n<tool_call>", "See:"),
        (HERMES, 'See:\n<tool_call>\n{"na', "See:"),
        (HERMES, ONE + '\n<tool_call>{"na', ""),
        (HERMES, ONE + "\n</tool", "</tool"),
        (HERMES, ONE.removesuffix("_call>"), ""),
        (LLAMA3_JSON, "<|pyth", "<|pyth"),
        (LLAMA3_JSON, '{"na', '{"na'),
        (LLAMA3_JSON, '<|python_tag|>{"na', ""),
        (LLAMA3_JSON, '{"name": "f", "parameters": {}}; {"na', ""),
        (MISTRAL, "See: [TOOL_", "See: [TOOL_"),
        (MISTRAL, "See: [TOOL_CALLS]", "See:"),
        (MISTRAL, 'See: [TOOL_CALLS][{"na', "See:"),
        (MISTRAL, '[TOOL_CALLS]{"na', ""),
        (MISTRAL, "[TOOL_CALLS]get_wea", ""),
        (MISTRAL, "[TOOL_CALLS]get_weather[AR", ""),
        (MISTRAL, "[TOOL_CALLS]no name at all", "no name at all"),
        (MISTRAL, '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g', ""),
    ],
)
def test_without_force_only_what_may_be_ordinary_text_is_content(tool_format: str, text: str, content: str) -> None:
    assert parsed(tool_format, [text]).content == content
    assert parsed(tool_format, list(text)).content == content


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": [1, "é🌧"]}}', '{"name": "g"}', "text", " ", "\n",
     "{", "}", '"', "\\", "<", "[TOOL_CALLS]", "[", "]", ";", ",", '{"name": "h", "parameters": {}}', "<|python_tag|>",
     '"arguments": ', "null", "[ARGS]", "f{}"]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(TOOL_FORMATS), st.lists(PIECES, max_size=9), st.data())
def test_any_text_in_any_chunks_gives_what_it_gives_whole(
    tool_format: str, pieces: list[str], data: st.DataObject
) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for is_forced in (False, True):
        assert parsed(tool_format, chunks, is_forced=is_forced) == parsed(tool_format, [text], is_forced=is_forced)
