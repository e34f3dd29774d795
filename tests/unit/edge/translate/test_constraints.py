"""Constraints are tried before anything is enqueued, and say what they cannot do."""

from __future__ import annotations

import json
import time
from typing import Any

import jsonschema
import llguidance
import pytest

from common.events import Grammar
from edge.translate import grammars
from edge.translate.grammars import _compiler_input, _trial_tokenizer
from tests.unit.edge.served_models import DEEPSEEK, QWEN, served
from tests.unit.edge.translate.calls import chat, completion, refusal, shown


def accepts(grammar: Grammar | None, text: str) -> bool:
    """Whether ``text`` is a complete match, byte by byte."""
    assert grammar is not None
    matcher = llguidance.LLMatcher(_trial_tokenizer(), _compiler_input(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and bool(matcher.is_accepting())


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "out", "strict": True, "schema": schema}}


def grammar_of(schema: Any) -> Grammar | None:
    return chat(response_format=json_schema(schema)).sampling.grammar


PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", '李雷 "q"\\/\n\u2028']},
        "age": {"type": "integer", "maximum": 9, "minimum": 1},
    },
    "required": ["name", "age"],
}
NODE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"v": {"enum": [1]}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["v", "next"],
        }
    },
}


def test_what_a_schema_allows_is_what_can_be_generated() -> None:
    grammar = grammar_of(PERSON)
    value = {"name": '李雷 "q"\\/\n\u2028', "age": 3}
    for separators in ((",", ":"), (", ", ": ")):
        assert accepts(grammar, json.dumps(value, ensure_ascii=False, separators=separators))
    jsonschema.validate(value, PERSON)
    assert not accepts(grammar, '{"name": "Ada"}')
    assert not accepts(grammar, '{"name": "Ada", "age": 3, "more": 1}')
    assert not accepts(grammar, '{"name":  "Ada", "age": 3}'), "more than one blank"
    assert not accepts(grammar, '{ "name": "Ada", "age": 3}'), "a blank where none belongs"
    assert accepts(grammar_of(NODE), '{"v": 1, "next": {"v": 1, "next": null}}')
    assert accepts(grammar_of({"type": "array", "items": {"enum": [7, 8]}, "minItems": 3, "maxItems": 3}), "[7,8,7]")


def test_an_object_without_listed_properties_stays_open() -> None:
    assert accepts(chat(response_format={"type": "json_object"}).sampling.grammar, '{"a": [1, {"b": null}]}')
    assert accepts(grammar_of({"type": "object"}), '{"a": 1}')
    composed = {"allOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {"type": "integer"}}}]}
    assert accepts(grammar_of({"type": "object", **composed}), '{"a":1,"b":2}')


def test_text_is_no_constraint_and_response_format_wins() -> None:
    assert chat(response_format={"type": "text"}).sampling.grammar is None
    both = chat(response_format={"type": "json_object"}, structured_outputs={"regex": "a"}).sampling.grammar
    assert both is not None
    assert both.kind == "json_schema"


REFUSED: list[tuple[Any, str]] = [
    ({}, "response_format.type"),
    ({"type": "xml"}, "response_format.type"),
    ({"type": "json_schema"}, "response_format.json_schema"),
    ({"type": "json_schema", "json_schema": []}, "response_format.json_schema"),
    ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
    (json_schema(True), "response_format.json_schema.schema"),
    (json_schema("x"), "response_format.json_schema.schema"),
    (json_schema({"type": "banana"}), "response_format.json_schema.schema"),
    (json_schema({"type": 5}), "response_format.json_schema.schema"),
    (json_schema({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}}), "response_format.json_schema.schema"),
    (json_schema({"$ref": "#"}), "response_format.json_schema.schema"),
    (json_schema({"$ref": "http://127.0.0.1/x"}), "response_format.json_schema.schema"),
    (json_schema({"$ref": "#/$defs/missing"}), "response_format.json_schema.schema"),
    (
        json_schema(
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        ),
        "response_format.json_schema.schema",
    ),
    (json_schema({"type": "string", "pattern": "^(?=.*x)[a-z]{3}$"}), "response_format.json_schema.schema"),
    (json_schema({"type": "string", "pattern": "("}), "response_format.json_schema.schema"),
    (json_schema({"not": {"type": "string"}}), "response_format.json_schema.schema"),
    (json_schema({"not": {}, "x-guidance": {"lenient": True}}), "response_format.json_schema.schema"),
    (json_schema({"enum": []}), "response_format.json_schema.schema"),
    (json_schema({"type": "integer", "minimum": 5, "maximum": 3}), "response_format.json_schema.schema"),
    (json_schema({"type": "array", "uniqueItems": True}), "response_format.json_schema.schema"),
    (json_schema({"properties": 5}), "response_format.json_schema.schema"),
]


@pytest.mark.parametrize(("response_format", "param"), REFUSED)
def test_a_format_that_cannot_be_kept_to_is_refused_by_name(response_format: Any, param: str) -> None:
    error = refusal(chat, response_format=response_format)
    assert error.param == param
    assert "site-packages" not in error.message
    assert len(error.message) < 500


def test_deep_and_huge_schemas_are_refused_in_time() -> None:
    deep: Any = {"type": "string"}
    for _ in range(65):
        deep = {"type": "object", "properties": {"a": deep}}
    started = time.thread_time()
    assert "nested" in refusal(chat, response_format=json_schema(deep)).message
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}
    assert "longer" in refusal(chat, response_format=json_schema(wide)).message
    chain = {f"n{i}": {"$ref": f"#/$defs/n{i + 1}"} for i in range(8000)}
    refusal(chat, response_format=json_schema({"$ref": "#/$defs/n0", "$defs": {**chain, "n8000": {"$ref": "#"}}}))
    blow: Any = {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(12)]} for i in range(6)]}
    refusal(chat, response_format=json_schema(blow))
    assert time.thread_time() - started < 10


def test_formats_that_nobody_knows_are_annotations() -> None:
    schema = {"type": "object", "properties": {"f": {"type": "string", "format": "binary"}}, "required": ["f"]}
    assert accepts(grammar_of(schema), '{"f":"x"}')
    assert not accepts(grammar_of({"type": "string", "format": "date"}), '"x"')
    data = {"const": {"format": "binary"}}
    assert accepts(
        grammar_of({"type": "object", "properties": {"c": data}, "required": ["c"]}), '{"c":{"format":"binary"}}'
    )


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, ["0", "-7", "9" * 18, "-1" + "0" * 18], ["1" * 20, "1.5"]),
        ({"type": ["integer", "null"]}, ["null", "12"], ["1" * 20]),
        ({"type": "integer", "minimum": 3}, ["3", "9" * 18], ["2", "1" * 20]),
        ({"type": "integer", "exclusiveMaximum": 3}, ["2", "-" + "9" * 18], ["3", "-" + "1" * 20]),
        ({"type": "integer", "multipleOf": 7}, ["7", "14"], ["8"]),
        ({"type": "integer", "enum": [5, 7]}, ["5", "7"], ["6"]),
        (
            {"type": "object", "properties": {"type": {"type": "integer"}}},
            ['{"type":7}'],
            ['{"type":' + "1" * 20 + "}"],
        ),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, ["7", '"a"'], ["1" * 20]),
        ({"type": "string"}, ['"' + "1" * 30 + '"'], ["1"]),
    ],
    ids=str,
)
def test_no_integer_goes_on_without_end(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    grammar = grammar_of(schema)
    assert [accepts(grammar, text) for text in good] == [True] * len(good)
    assert [accepts(grammar, text) for text in bad] == [False] * len(bad)


STRUCTURED: list[tuple[dict[str, Any], str, str]] = [
    ({"regex": "[ab]{2}"}, "ab", "abc"),
    ({"regex": "^a/b$"}, "a/b", "a"),
    ({"choice": ["yes", 'no "q"\\', "é🌧"]}, 'no "q"\\', "maybe"),
    ({"json": PERSON}, '{"name":"Ada","age":1}', "{}"),
    ({"json": json.dumps(PERSON)}, '{"name": "Ada", "age": 1}', "{}"),
    ({"json": PERSON, "disable_any_whitespace": True}, '{"name":"Ada","age":1}', '{"name": "Ada", "age": 1}'),
    ({"json_object": True}, "{}", "[]"),
    ({"grammar": 'start: "a" | "b" start'}, "bba", "c"),
    ({"grammar": 'root ::= "a" | "b" root'}, "bba", "c"),
]


@pytest.mark.parametrize(("structured", "good", "bad"), STRUCTURED)
@pytest.mark.parametrize("make", [chat, completion])
def test_structured_outputs(make: Any, structured: dict[str, Any], good: str, bad: str) -> None:
    grammar = make(structured_outputs=structured).sampling.grammar
    assert accepts(grammar, good)
    assert not accepts(grammar, bad)


@pytest.mark.parametrize(
    ("structured", "param"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
        ({"regex": ""}, "structured_outputs.regex"),
        ({"regex": "a\0"}, "structured_outputs.regex"),
        ({"regex": "("}, "structured_outputs.regex"),
        ({"regex": 5}, "structured_outputs.regex"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": [""]}, "structured_outputs.choice"),
        ({"choice": [1]}, "structured_outputs.choice"),
        ({"choice": ["x"] * 5001}, "structured_outputs.choice"),
        ({"grammar": "start: missing"}, "structured_outputs.grammar"),
        ({"grammar": "start: start"}, "structured_outputs.grammar"),
        ({"grammar": 'root ::= ("a"'}, "structured_outputs.grammar"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": 5}, "structured_outputs.json"),
        ({"json_object": False}, "structured_outputs.json_object"),
        ({"json_object": True, "whitespace_pattern": 5}, "structured_outputs.whitespace_pattern"),
        ({"json": {}, "disable_additional_properties": "yes"}, "structured_outputs.disable_additional_properties"),
        ({"structural_tag": {}}, "structured_outputs.structural_tag"),
    ],
)
def test_structured_outputs_that_make_no_sense_are_refused(structured: dict[str, Any], param: str) -> None:
    assert refusal(chat, structured_outputs=structured).param == param


def test_a_reasoning_model_is_bound_only_after_its_reasoning() -> None:
    after_open = chat(served(DEEPSEEK), response_format=json_schema(PERSON)).sampling.grammar
    assert accepts(after_open, 'any {"x"} text</think>\n\n{"name":"Ada","age":1}')
    assert not accepts(after_open, '{"name":"Ada","age":1}')
    may_open = chat(served(QWEN), structured_outputs={"choice": ["yes", "no"]}).sampling.grammar
    assert accepts(may_open, "<think>\nhm\n</think>\n\nyes")
    assert accepts(may_open, "no")
    assert not accepts(may_open, "hm")
    written = {"response_format": json_schema({"enum": [1]}), "continue_final_message": True}
    for content, is_open in (("<think>hm", True), ("<think>hm</think>\n\n", False), ("So:", False)):
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
        continued = chat(served(QWEN), messages=messages, **written)
        assert (shown(continued).in_reasoning, accepts(continued.sampling.grammar, "1")) == (is_open, not is_open)
    switched_off = chat(served(QWEN), reasoning_effort="none", structured_outputs={"regex": "a/b"}).sampling.grammar
    assert switched_off == Grammar(kind="regex", source="a/b", param="structured_outputs.regex")


@pytest.mark.parametrize(
    "asked",
    [
        {"grammar": 'start: "a"{1000000}'},
        {"grammar": 'start: x{1000}\nx: y{1000}\ny: "a"'},
        {"grammar": 'start: "a" start'},
        {"grammar": 'start: "yes" | "no" "a"{1000000}'},
        {"grammar": 'root ::= "a"{1000000}'},
        {"regex": "a{1000000}"},
        {"regex": "(" * 50 + "a{1,30}" + "){1,30}" * 50},
    ],
    ids=str,
)
def test_what_compiles_and_is_too_large_to_be_followed_is_refused(asked: dict[str, str]) -> None:
    error = refusal(chat, structured_outputs=asked)
    assert error.param == f"structured_outputs.{next(iter(asked))}"
    assert "too large to be followed" in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"regex": r"[^\s\S]"}, "nothing can match it"),
        ({"grammar": "start: start"}, "nothing can match it"),
        ({"json": {"not": {}}}, 'not supported: "not"'),
        ({"json": {"$ref": "#/nope"}}, "a $ref leads nowhere: '#/nope'"),
        ({"json": {"type": "strin"}}, "there is no such type: strin"),
        ({"grammar": 'start: "a'}, "line 1, column 10: the grammar cannot be read"),
        ({"grammar": "start: nowhere"}, 'line 1, column 8: unknown name: "nowhere"'),
    ],
    ids=str,
)
def test_a_refusal_is_in_words_that_a_client_can_use(asked: dict[str, Any], words: str) -> None:
    message = refusal(chat, structured_outputs=asked).message
    assert words in message
    assert "<state>" not in message


@pytest.mark.parametrize("source", ['start: "a"{5000}', "start: /(a|b){1,5000}c/", "start: /.*/"])
def test_large_constraints_that_can_be_followed_are_taken(source: str) -> None:
    assert chat(structured_outputs={"grammar": source}).sampling.grammar is not None


def test_a_constraint_that_was_tried_is_not_tried_again() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(50)}}
    grammar_of(schema)
    before = dict(grammars._known)
    assert grammar_of(schema) == grammar_of(schema)
    assert dict(grammars._known) == before
