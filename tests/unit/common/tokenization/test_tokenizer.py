"""Encoding and decoding against transformers, with the demo model's tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import ConfigError, InvalidRequest
from common.tokenization.tokenizer import Tokenizer
from tests.unit.common.tokenization.conftest import (
    as_transformers,
    edited,
    encodable_text,
    sentencepiece_json,
    smollm2_config,
    smollm2_json,
)

TEXTS = [
    "",
    " ",
    "Hello world",
    "  leading and   inner spaces\n\n\tand tabs",
    "naïve 漢字 🦊🧪 🇺🇳 ﷽ e\u0301",
    "price: 12345.67 € in 2029",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return x ** 2\n",
    "a" * 300,
]


@pytest.fixture(scope="module")
def reference() -> Any:
    return as_transformers(smollm2_json(), smollm2_config())


@pytest.mark.parametrize("text", TEXTS)
def test_encodes_as_transformers_does(smollm2: Tokenizer, reference: Any, text: str) -> None:
    assert smollm2.encode(text) == reference.encode(text)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("skip", [True, False])
def test_decodes_as_transformers_does(smollm2: Tokenizer, reference: Any, text: str, skip: bool) -> None:
    ids = reference.encode(text)
    assert smollm2.decode(ids, skip_special_tokens=skip) == reference.decode(ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0, 49151), max_size=30))
def test_decodes_any_ids_as_transformers_does(ids: list[int]) -> None:
    reference, ours = _pair()
    assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@given(encodable_text(60))
def test_encoding_and_decoding_any_text_gives_it_back(text: str) -> None:
    _, ours = _pair()
    assert ours.decode(ours.encode(text, allow_special=False), skip_special_tokens=False) == text


def _pair(cache: list[Any] = []) -> tuple[Any, Tokenizer]:  # noqa: B006 - hypothesis forbids function-scoped fixtures
    if not cache:
        cache += [
            as_transformers(smollm2_json(), smollm2_config()),
            Tokenizer.from_json(smollm2_json(), smollm2_config()),
        ]
    return cache[0], cache[1]


def test_spelled_out_control_tokens_stay_text_unless_allowed(smollm2: Tokenizer) -> None:
    assert smollm2.encode("<|im_end|>") == [2]
    as_text = smollm2.encode("<|im_end|>", allow_special=False)
    assert len(as_text) > 1
    assert smollm2.special_ids.isdisjoint(as_text)
    assert smollm2.decode(as_text) == "<|im_end|>"


def test_bos_is_added_once_where_the_configuration_asks_for_it() -> None:
    tokenizer = Tokenizer.from_json(smollm2_json(), {**smollm2_config(), "add_bos_token": True})
    assert tokenizer.encode("hi")[0] == 1
    assert tokenizer.encode("hi", add_special_tokens=False)[0] != 1
    from_post_processor = Tokenizer.from_json(sentencepiece_json(), {"bos_token": "<s>", "add_bos_token": True})
    assert from_post_processor.encode("the")[:2].count(1) == 1


def test_sentencepiece_texts_round_trip_and_match_transformers(sentencepiece: Tokenizer) -> None:
    reference = as_transformers(sentencepiece_json(), {"bos_token": "<s>", "eos_token": "</s>"})
    for text in ["the end", " the  end", "Té 漢🦊", "x\ny"]:
        ids = sentencepiece.encode(text)
        assert ids == reference.encode(text)
        assert sentencepiece.decode(ids) == reference.decode(ids, skip_special_tokens=True) == text


def test_bytes_of_tokens_spell_the_text(smollm2: Tokenizer) -> None:
    text = "naïve 🦊!"
    assert b"".join(smollm2.token_bytes(token_id) for token_id in smollm2.encode(text)) == text.encode()
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2.token_bytes(10**6) == b""


def test_ids_beyond_the_vocabulary_decode_to_nothing(smollm2: Tokenizer) -> None:
    assert smollm2.decode([49152, 60000]) == ""
    assert smollm2.vocab_size == 49152


def test_tokens_declared_only_in_the_configuration_are_known() -> None:
    declared = {"49152": {"content": "<extra>", "special": True, "lstrip": False, "rstrip": False}}
    tokenizer = Tokenizer.from_json(smollm2_json(), {**smollm2_config(), "added_tokens_decoder": declared})
    assert tokenizer.encode("a<extra>")[-1] == 49152
    assert tokenizer.decode([49152]) == ""


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (b"{", "not JSON"),
        (b"{}", "cannot be used"),
        (edited(sentencepiece_json(), decoder={"type": "WordPiece", "prefix": "##", "cleanup": True}), "WordPiece"),
        (edited(sentencepiece_json(), decoder=None), "no decoder"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(broken: bytes, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Tokenizer.from_json(broken)


def test_truncation_and_padding_in_the_file_are_ignored() -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    tokenizer = Tokenizer.from_json(edited(smollm2_json(), truncation=truncation), smollm2_config())
    assert len(tokenizer.encode("one two three four five")) == 5
    assert json.loads(smollm2_json())["truncation"] is None


def test_half_a_surrogate_pair_is_the_clients_error(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        smollm2.encode("\ud800")
