"""What is not a JSON object of the declared types is refused; the message says where and is bounded."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import HeadraceError, InvalidRequest
from edge.openai.decoding import decode_object, echo
from edge.translate.requests import parse_chat, parse_completion

MALFORMED: list[bytes] = [
    b"", b"   ", b"{", b"nonsense", b'{"messages": [}', b'{"messages": [],}', b'{"a": 1} x', b"[]", b'"text"', b"5",
    b"null", b'{"messages": [], "temperature": NaN}', b'{"temperature": Infinity, "messages": []}',
    b'{"temperature": -Infinity, "messages": []}', b'{"temperature": 1e999, "messages": []}',
    b'{"messages": [{"role": "user", "content": "\xff"}]}', b"\xff\xfe{\x00}\x00",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"{'messages': []}", b'{"seed": 01, "messages": []}',
    b'{"n": 1' + b"0" * 5000 + b', "messages": []}',
]  # fmt: skip


@pytest.mark.parametrize("raw", MALFORMED)
def test_malformed_bodies_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(raw)
    assert caught.value.param in (None, "temperature"), "no field can be named, and a byte is none"


@pytest.mark.parametrize("depth", [201, 1000, 100_000])
def test_deep_nesting_is_refused_before_anything_recursive_sees_it(depth: int) -> None:
    raw = b'{"messages": ' + b"[" * depth + b"]" * depth + b"}"
    with pytest.raises(InvalidRequest, match="nested"):
        parse_chat(raw)


def test_brackets_in_strings_are_no_nesting() -> None:
    raw = b'{"messages": [{"role": "user", "content": "' + b'[{\\"' * 5000 + b'"}]}'
    assert parse_chat(raw).messages[0]["role"] == "user"


@pytest.mark.parametrize(
    ("raw", "param", "shown"),
    [
        (b"{}", "messages", "messages is required"),
        (b'{"messages": "hello"}', "messages", "messages: expected array, got 'hello'"),
        (b'{"messages": ["x"]}', "messages[0]", "messages[0]: expected object, got 'x'"),
        (b'{"messages": [], "stream_options": {"include_usage": 1}}', "stream_options.include_usage", "got 1"),
        (b'{"messages": [], "response_format": []}', "response_format", "got []"),
        (b'{"messages": [], "stop": ["a", 1]}', "stop[1]", "got 1"),
    ],
)
def test_a_wrong_type_is_named_with_its_value(raw: bytes, param: str, shown: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(raw)
    assert caught.value.param == param
    assert shown in caught.value.message


def test_unknown_fields_are_kept_apart_and_a_client_cannot_set_them() -> None:
    body = parse_chat(b'{"messages": [], "favourite": "blue", "nothing": null, "unknown_fields": {"a": 1}}')
    assert body.unknown_fields == {"favourite": "blue", "unknown_fields": {"a": 1}}


def test_unknown_fields_inside_an_object_are_told_by_their_path() -> None:
    body = parse_chat(b'{"messages": [], "stream_options": {"include_usage": true, "every": 2, "none": null}}')
    assert body.unknown_fields == {"stream_options.every": 2}


def test_a_whole_number_is_an_integer_however_it_is_written() -> None:
    body = parse_chat(b'{"messages": [], "max_tokens": 16.0, "n": 1e0, "temperature": 1}')
    assert (body.max_tokens, body.n, body.temperature) == (16, 1, 1.0)


def test_echoes_are_bounded() -> None:
    huge: Any = [{"k" * 999: ["v" * 999] * 999}] * 999
    values: list[Any] = [huge, "x" * 10**6, 10**10**4, {"a": {"b": {"c": {"d": {}}}}}]
    for value in values:
        assert len(echo(value)) <= 203


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    for parse in (decode_object, parse_chat, parse_completion):
        with contextlib.suppress(HeadraceError):
            parse(raw)
