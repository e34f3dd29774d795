"""Thinking apart from the answer, for any chunking."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.parsers.parts import Content, Reasoning
from edge.parsers.reasoning import ThinkParser


def parsed(chunks: Sequence[str], *, is_open: bool) -> tuple[str, str]:
    parser = ThinkParser(is_open=is_open)
    parts = [part for chunk in chunks for part in parser.feed(chunk)] + parser.finish()
    assert all(part.text for part in parts if isinstance(part, Content | Reasoning))
    kinds = [type(part) for part in parts]
    assert kinds == sorted(kinds, key=lambda kind: kind is Content), "reasoning comes first"
    return (
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        "".join(part.text for part in parts if isinstance(part, Content)),
    )


@pytest.mark.parametrize(
    ("is_open", "text", "reasoning", "content"),
    [
        (False, "<think>\nhm, so\n</think>\n\nThe answer.\n", "hm, so", "The answer.\n"),
        (False, "no thinking at all", "", "no thinking at all"),
        (False, "  indented", "", "  indented"),
        (False, "a <think> later", "", "a <think> later"),
        (False, "<think></think>x", "", "x"),
        (False, "<think>never closed", "never closed", ""),
        (False, "<thi", "", "<thi"),
        (True, "hm</think>x", "hm", "x"),
        (True, "<think>hm</think>x", "hm", "x"),
        (True, "never closed</thin", "never closed</thin", ""),
        (True, "</think>\n\nx", "", "x"),
        (True, "a < b </ think> c</think>d", "a < b </ think> c", "d"),
    ],
)
def test_reasoning_and_content(is_open: bool, text: str, reasoning: str, content: str) -> None:
    assert parsed([text], is_open=is_open) == (reasoning, content)
    assert parsed(list(text), is_open=is_open) == (reasoning, content)


PIECES = st.sampled_from(["<think>", "</think>", "<", "/", "think>", "a", " ", "\n", "text", "</th"])


@settings(max_examples=300, deadline=None)
@given(st.booleans(), st.lists(PIECES, max_size=9), st.data())
def test_any_chunks_give_the_same(is_open: bool, pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(chunks, is_open=is_open) == parsed([text], is_open=is_open)
