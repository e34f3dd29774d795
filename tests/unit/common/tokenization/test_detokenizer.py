"""Streaming decode: whole characters, the same text however it is cut, exact after a resume."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.tokenization.tokenizer import Tokenizer
from tests.unit.common.tokenization.conftest import encodable_text, sentencepiece_json, smollm2_json

MULTI_BYTE = "é漢🦊🇺🇳👩‍👩‍👧‍👦 ﷽ e\u0301 \U0010ffff"


@cache
def tokenizers_of_both_families() -> tuple[Tokenizer, Tokenizer]:
    return Tokenizer.from_json(smollm2_json()), Tokenizer.from_json(sentencepiece_json())


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The finest cut: one token a byte."""
    by_piece = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    return [by_piece[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("family", [0, 1])
def test_deltas_are_whole_characters_and_add_up(family: int) -> None:
    tokenizer = tokenizers_of_both_families()[family]
    ids = byte_ids(tokenizer, MULTI_BYTE)
    detokenizer = tokenizer.detokenizer()
    deltas = [detokenizer.feed(token_id) for token_id in ids]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(deltas)
    assert [delta for delta in deltas if delta] == list(MULTI_BYTE)
    assert "".join(deltas) == tokenizer.decode(ids) == MULTI_BYTE


@pytest.mark.parametrize("family", [0, 1])
def test_resuming_at_every_cut_goes_on_exactly(family: int) -> None:
    tokenizer = tokenizers_of_both_families()[family]
    ids = [*tokenizer.encode("the end "), *byte_ids(tokenizer, MULTI_BYTE)]
    whole = tokenizer.detokenizer()
    deltas = [whole.feed(token_id) for token_id in ids]
    for cut in range(len(ids) + 1):
        resumed = tokenizer.detokenizer()
        assert resumed.feed_all(ids[:cut]) == "".join(deltas[:cut])
        assert [resumed.feed(token_id) for token_id in ids[cut:]] == deltas[cut:]


@pytest.mark.parametrize("family", [0, 1])
def test_an_unfinished_character_at_the_end_is_left_out(family: int) -> None:
    tokenizer = tokenizers_of_both_families()[family]
    ids = byte_ids(tokenizer, "ok 🦊")[:-1]
    assert tokenizer.detokenizer().feed_all(ids) == "ok "
    assert tokenizer.decode(ids).startswith("ok \N{REPLACEMENT CHARACTER}")


@given(st.lists(st.integers(0, 49151), max_size=40))
def test_deltas_of_any_tokens_add_up_to_the_decoded_text(ids: list[int]) -> None:
    tokenizer = tokenizers_of_both_families()[0]
    detokenizer = tokenizer.detokenizer()
    text = "".join(detokenizer.feed(token_id) for token_id in ids)
    assert tokenizer.decode(ids) == text + detokenizer.flush_replaced()


@given(encodable_text(50), st.sampled_from([0, 1]))
def test_any_text_streams_back_unchanged(text: str, family: int) -> None:
    tokenizer = tokenizers_of_both_families()[family]
    ids = tokenizer.encode(text, allow_special=False, add_special_tokens=False)
    assert tokenizer.detokenizer(skip_special_tokens=False).feed_all(ids) == text


def test_special_tokens_are_skipped_or_shown(smollm2: Tokenizer) -> None:
    ids = [*smollm2.encode("a"), 2, *smollm2.encode("b")]
    assert smollm2.detokenizer().feed_all(ids) == "ab"
    assert smollm2.detokenizer(skip_special_tokens=False).feed_all(ids) == "a<|im_end|>b"


def test_a_skipped_token_does_not_break_a_character(smollm2: Tokenizer) -> None:
    first, *rest = byte_ids(smollm2, "漢")
    assert smollm2.detokenizer().feed_all([first, 2, *rest]) == "漢"


def test_only_the_first_space_of_a_sentencepiece_text_is_dropped(sentencepiece: Tokenizer) -> None:
    the = sentencepiece.token_id("▁the")
    assert the is not None
    assert sentencepiece.detokenizer().feed_all([1, the, the]) == "the the"
