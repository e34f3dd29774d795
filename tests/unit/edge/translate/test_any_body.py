"""Whatever a client sends is translated or refused with one of our errors; never anything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import HeadraceError
from common.events import decode_request, encode
from edge.openai.chat import ChatCompletionRequest
from edge.openai.completions import CompletionRequest
from edge.openai.tokenize import DetokenizeRequest, TokenizeRequest
from edge.translate.requests import Translated, parse_chat, parse_completion, translate_chat, translate_completion
from edge.translate.tokenization import detokenize, parse_detokenize, parse_tokenize, tokenize
from tests.unit.edge.served_models import DEEPSEEK, LLAMA, MISTRAL, PLAIN, QWEN, served
from tests.unit.edge.translate.calls import ADMISSION, COMPAT, STRICT, USER
from tests.unit.edge.translate.test_tools import TOOLS

SCALARS = (
    st.none() | st.booleans() | st.integers(-3, 40) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(["auto", "none", "required", "user", "assistant", "text", "<|im_end|>"])
)  # fmt: skip
KEYS = st.sampled_from(
    ["type", "function", "name", "arguments", "role", "content", "tool_calls", "text", "schema", "json_schema",
     "properties", "items", "required", "$ref", "$defs", "anyOf", "allOf", "enum", "include_usage", "regex", "choice",
     "json", "grammar", "parameters", "strict", "minItems", "pattern", "additionalProperties", "x-guidance", "format"]
) | st.text(max_size=4)  # fmt: skip
JSON = st.recursive(
    SCALARS | st.sampled_from(["object", "array", "string", "json_schema", "json_object", "#", "#/$defs/a", "a+", "("]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
SCHEMAS = st.recursive(
    st.sampled_from(
        [{"type": "string"}, {"type": "integer"}, {"enum": [1, "a"]}, {"$ref": "#"}, {"type": "null"}, {}, 5]
    ),
    lambda inner: st.one_of(
        st.fixed_dictionaries({"type": st.just("array"), "items": inner}, optional={"minItems": st.integers(0, 3)}),
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from("ab"), inner, max_size=2)},
            optional={"required": st.lists(st.sampled_from("abc"), max_size=2), "additionalProperties": inner},
        ),
        st.fixed_dictionaries({"anyOf": st.lists(inner, max_size=3)}),
        st.fixed_dictionaries({"allOf": st.lists(inner, max_size=2)}),
    ),
    max_leaves=6,
)
FORMATS = st.fixed_dictionaries(
    {"type": st.just("json_schema"), "json_schema": st.fixed_dictionaries({"schema": SCHEMAS})}
)


def bodies(kind: type[Any], usual: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Any values in a few of the fields, the rest as usual."""
    names = st.sampled_from([*kind.__struct_fields__, "user", "guided_json", "unheard_of"])
    return st.dictionaries(names, JSON | FORMATS, max_size=4).map(lambda fields: {**usual, **fields})


def translated_or_refused(translate: Callable[[], Translated | object]) -> None:
    """Complete, or refused by one of our errors that names a field and does not echo without bound."""
    try:
        translated = translate()
    except HeadraceError as error:
        refused = error
    else:
        if isinstance(translated, Translated):
            request = translated.request
            assert decode_request(encode(request)) == request
            assert request.sampling.max_tokens >= 1
            assert all(request.prompts)
        return
    assert refused.param is not None
    assert len(refused.message) < 1500


SLOW = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@SLOW
@given(bodies(ChatCompletionRequest, {"messages": USER}), st.sampled_from([PLAIN, QWEN, DEEPSEEK, LLAMA, MISTRAL, ""]))
def test_any_chat_body(body: dict[str, Any], template: str) -> None:
    raw, model = json.dumps(body).encode(), served(template)
    translated_or_refused(lambda: translate_chat(parse_chat(raw), model, ADMISSION, STRICT))
    translated_or_refused(lambda: translate_chat(parse_chat(raw), model, ADMISSION, COMPAT))


@SLOW
@given(st.lists(st.dictionaries(KEYS, JSON, max_size=4), max_size=3), st.sampled_from([PLAIN, QWEN]))
def test_any_messages_and_tools(messages: list[dict[str, Any]], template: str) -> None:
    model = served(template)
    first = json.dumps({"messages": messages, "tools": TOOLS}).encode()
    second = json.dumps({"messages": USER, "tools": messages, "tool_choice": "required"}).encode()
    translated_or_refused(lambda: translate_chat(parse_chat(first), model, ADMISSION, STRICT))
    translated_or_refused(lambda: translate_chat(parse_chat(second), model, ADMISSION, STRICT))


@SLOW
@given(bodies(CompletionRequest, {"prompt": "hi"}))
def test_any_completion_body(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    translated_or_refused(lambda: translate_completion(parse_completion(raw), served(), ADMISSION, COMPAT))


@SLOW
@given(bodies(TokenizeRequest, {"prompt": "hi"}), bodies(DetokenizeRequest, {"tokens": [3]}))
def test_any_body_of_the_tokenizer_routes(first: dict[str, Any], second: dict[str, Any]) -> None:
    translated_or_refused(lambda: tokenize(parse_tokenize(json.dumps(first).encode()), served()))
    translated_or_refused(lambda: detokenize(parse_detokenize(json.dumps(second).encode()), served()))


def test_tokenize_counts_what_a_generation_would_get() -> None:
    model = served()
    counted = tokenize(parse_tokenize(json.dumps({"messages": USER, "return_token_strs": True}).encode()), model)
    request = translate_chat(parse_chat(json.dumps({"messages": USER}).encode()), model, ADMISSION, STRICT).request
    assert tuple(counted.tokens) == request.prompts[0]
    assert counted.count == len(counted.tokens) == len(counted.token_strs or ())
    assert counted.max_model_len == model.card.max_model_len
    assert detokenize(parse_detokenize(b'{"tokens": [2]}'), model).prompt == "<|im_end|>"
