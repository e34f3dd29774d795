"""response_format and structured_outputs to a `Grammar`, tried before anything is enqueued.

White space in JSON is at most one blank after a comma or colon, so that no model can fill its budget with it. A model
that reasons is bound only after its reasoning: the constraint then becomes one grammar with the reasoning before it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import llguidance
import msgspec

from common.errors import InvalidRequest, UnsupportedParameter
from common.events import Grammar
from edge.openai.decoding import echo
from edge.openai.sampling import GenerationFields
from edge.translate import schemas
from edge.translate.grammars import GrammarRefused, check_grammar, gbnf_to_lark
from edge.translate.schemas import Schema

JSON_OBJECT: Final[Schema] = {"type": "object"}
NO_WHITESPACE: Final[Mapping[str, object]] = {"whitespace_flexible": False, "whitespace_pattern": None}
JSON_STYLE: Final[Mapping[str, object]] = {**NO_WHITESPACE, "item_separator": ",[ ]?", "key_separator": ":[ ]?"}
LENIENT: Final[Mapping[str, object]] = {**JSON_STYLE, "lenient": True, "coerce_one_of": True}
MAX_CHOICES: Final = 5000
_UNKNOWN_FORMAT: Final = "Unknown format: "
_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object")
_OPTIONS: Final = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties", "disable_fallback")


@dataclass(frozen=True, slots=True)
class Thinking:
    """What may stand before the constrained text. ``is_open``: the prompt ends inside the reasoning."""

    is_open: bool = False
    may_open: bool = False  # the model may begin with the opening tag

    @property
    def is_possible(self) -> bool:
        return self.is_open or self.may_open


NO_THINKING: Final = Thinking()
OURS: Final = "// composed\nstart: "  # how each Lark grammar of ours begins


def output_constraint(body: GenerationFields) -> Grammar | None:
    """The constraint that the body asks for, if any. Raises `InvalidRequest` naming the field that is wrong."""
    if body.response_format is not None:
        grammar = _response_format(body.response_format)
        if grammar is not None:
            return grammar
    if body.structured_outputs is None:
        return None
    return _structured({key: value for key, value in body.structured_outputs.items() if value is not None})


def json_grammar(schema: Schema, param: str, *, options: Mapping[str, object] = JSON_STYLE) -> Grammar:
    """A grammar for values of ``schema``; with `LENIENT`, for as much of it as can be expressed.

    Raises `InvalidRequest`: malformed, unsatisfiable, or not expressible.
    """
    schemas.check_depth(schema, param)
    schemas.check_finite(schema, param)
    try:
        return _schema_grammar(schemas.bounded(schemas.closed(schema)), param, options)
    except GrammarRefused:
        return _schema_grammar(schema, param, options)


def lark_schema(grammar: Grammar) -> str:
    """A schema grammar as an operand inside a Lark grammar."""
    return f"%json {grammar.source}"


def after_thinking(grammar: Grammar, thinking: Thinking, param: str) -> Grammar:
    """``grammar``, bound only after the reasoning where there may be some."""
    if not thinking.is_possible:
        return grammar
    opening = "think sp answer" if thinking.is_open else '("<think>" think sp)? answer'
    rules = f'think[suffix="</think>"]: /(?s:.*)/\nsp: /[ \\n]{{0,4}}/\n{lark_rule("answer", grammar, param)}'
    source = f"{OURS}{opening}\n{rules}\n"
    return check_grammar(Grammar(kind="lark", source=source), param)


def lark_text(text: str) -> str:
    """A literal in Lark."""
    return json.dumps(text, ensure_ascii=False)


def lark_rule(name: str, grammar: Grammar, param: str) -> str:
    """``grammar`` as the rule ``name`` of a Lark grammar. Raises `UnsupportedParameter` for a Lark grammar of a
    client, whose rules could clash with ours."""
    if grammar.kind == "json_schema":
        return f"{name}: {lark_schema(grammar)}"
    if grammar.kind == "regex":
        return f"{name}: /{llguidance.regex_to_lark(grammar.source)}/"
    if grammar.kind == "choice":
        return f"{name}: " + " | ".join(map(lark_text, json.loads(grammar.source)))
    if grammar.source.startswith(OURS):
        return f"{name}: " + grammar.source.removeprefix(OURS)
    raise UnsupportedParameter(
        f"{param}: a grammar cannot be combined with reasoning or tools; switch them off", param=param
    )


def _schema_grammar(schema: Schema, param: str, options: Mapping[str, object]) -> Grammar:
    for _ in range(16):
        source = msgspec.json.encode(schemas.with_options(schema, **options)).decode()
        try:
            return check_grammar(Grammar(kind="json_schema", source=source), param)
        except GrammarRefused as refused:
            if not refused.reason.startswith(_UNKNOWN_FORMAT):
                raise
            schema = schemas.without_formats(schema, refused.reason.removeprefix(_UNKNOWN_FORMAT))
    raise GrammarRefused("too many unknown formats", param)


def _response_format(given: Mapping[str, Any]) -> Grammar | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema")  # some servers take one here; a schema that is sent is kept to
        return json_grammar(
            JSON_OBJECT if schema is None else _schema_of(schema, "response_format.schema"), "response_format"
        )
    if kind != "json_schema":
        raise InvalidRequest(
            f"response_format.type must be text, json_object or json_schema, got {echo(kind)}",
            param="response_format.type",
        )
    wrapper = given.get("json_schema")
    if not isinstance(wrapper, dict):
        raise InvalidRequest(
            f"response_format.json_schema must be an object with a schema, got {echo(wrapper)}",
            param="response_format.json_schema",
        )
    param = "response_format.json_schema.schema"
    return json_grammar(_schema_of(wrapper.get("schema"), param), param)


def _schema_of(value: object, param: str) -> Schema:
    if isinstance(value, dict):
        return value
    raise InvalidRequest(f"{param} must be a JSON schema object, got {echo(value)}", param=param)


def _structured(given: Mapping[str, Any]) -> Grammar:
    unknown = sorted(set(given) - set(_KINDS) - set(_OPTIONS))
    if unknown:
        param = f"structured_outputs.{echo(unknown[0])[1:-1]}"
        raise UnsupportedParameter(f"{param} is not supported", param=param)
    kinds = [kind for kind in _KINDS if kind in given]
    if len(kinds) != 1:
        raise InvalidRequest(
            f"structured_outputs must have exactly one of {', '.join(_KINDS)}, got {', '.join(kinds) or 'none'}",
            param="structured_outputs",
        )
    kind = kinds[0]
    param = f"structured_outputs.{kind}"
    value = given[kind]
    match kind:
        case "json":
            return json_grammar(_parsed_schema(value, param), param, options=_json_options(given))
        case "json_object":
            if value is not True:
                raise InvalidRequest(f"{param} must be true, got {echo(value)}", param=param)
            return json_grammar(JSON_OBJECT, param, options=_json_options(given))
        case "choice":
            return _choice(value, param)
        case _:
            return _text_grammar(kind, value, param)


def _json_options(given: Mapping[str, Any]) -> Mapping[str, object]:
    for name in _OPTIONS:
        kind = str if name == "whitespace_pattern" else bool
        if name in given and not isinstance(given[name], kind):
            param = f"structured_outputs.{name}"
            raise InvalidRequest(f"{param} must be of type {kind.__name__}, got {echo(given[name])}", param=param)
    if given.get("disable_any_whitespace"):
        return NO_WHITESPACE
    pattern = given.get("whitespace_pattern")
    return JSON_STYLE if pattern is None else {"whitespace_pattern": pattern}


def _parsed_schema(value: object, param: str) -> Schema:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidRequest(f"{param} is not JSON: {error}", param=param) from error
    return _schema_of(value, param)


def _choice(value: object, param: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise InvalidRequest(
            f"{param} must be a list of texts, at least one, none empty, got {echo(value)}", param=param
        )
    if len(value) > MAX_CHOICES:
        raise InvalidRequest(f"{param} has {len(value)} texts, the limit is {MAX_CHOICES}", param=param)
    return check_grammar(Grammar(kind="choice", source=json.dumps(value, ensure_ascii=False)), param)


def _text_grammar(kind: str, value: object, param: str) -> Grammar:
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(f"{param} must be text and not empty, got {echo(value)}", param=param)
    if "\0" in value:
        raise InvalidRequest(f"{param} must not contain NUL", param=param)
    if kind == "regex":
        return check_grammar(Grammar(kind="regex", source=value), param)
    source = gbnf_to_lark(value, param) if "::=" in value else value
    return check_grammar(Grammar(kind="lark", source=source), param)
