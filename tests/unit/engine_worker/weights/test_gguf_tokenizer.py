"""The vocabulary of a GGUF file cuts texts as the model's own tokenizer does."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
import tokenizers

from common.errors import CheckpointMismatch, UnsupportedModel
from common.tokenization.tokenizer import Tokenizer
from engine_worker.weights.gguf_tokenizer import tokenizer_files
from engine_worker.weights.model_files import open_model
from tests.demo_model import demo_model_dir
from tests.unit.engine_worker.weights.tiny_gguf import TOKENS, byte_level_vocabulary

TEXTS = (
    "Hello, world! It's 2024: 12345 times.",
    "def f(x):\n    return x ** 2  # noqa\n\n\n",
    "  leading,  double   spaces\ttabs ",
    "Grüße aus Köln, 日本語のテキスト, Привет, emoji 🎉👩‍👩‍👧, ½ and ٣٤",
    "<|im_start|>user\nHi there!<|im_end|>\n",
    "",
)


def _metadata(**changes: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in byte_level_vocabulary(**changes).items()}


def _pieces(metadata: dict[str, Any], text: str) -> list[str]:
    content, config = tokenizer_files(metadata)
    tokenizer = Tokenizer.from_json(content, config)
    return [tokenizer.token_text(i) for i in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "ab123 abcd", ["ab", "1", "2", "3", " ab", "cd"]),  # digits one by one, whatever the merges say
        ("gpt-2", "ab123 abcd", ["ab", "123", " ab", "cd"]),
        ("default", "123", ["123"]),
        ("llama-bpe", "1234", ["123", "4"]),  # up to three digits
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("tekken", "1234", ["1", "2", "3", "4"]),
        ("llama-bpe", "abcd\n", ["abcd", "\n"]),
        ("qwen2", "<|user|>ab<|end|>", ["<|user|>", "ab", "<|end|>"]),
    ],
)
def test_each_pre_tokenizer_cuts_as_its_models_do(pre: str, text: str, expected: list[str]) -> None:
    assert _pieces(_metadata(pre=pre), text) == expected


def test_bos_and_eos_are_added_where_the_file_says_so() -> None:
    assert _pieces(_metadata(bos_token_id=1, add_bos_token=True, add_eos_token=True), "ab") == [
        "<|user|>",
        "ab",
        "<|end|>",
    ]
    assert _pieces(_metadata(bos_token_id=1, add_bos_token=False), "ab") == ["ab"]
    assert _pieces(_metadata(pre="llama-bpe", bos_token_id=1), "ab") == ["<|user|>", "ab"]  # its models want one


def test_special_tokens_are_named() -> None:
    _, config = tokenizer_files(
        {**_metadata(bos_token_id=1), "general.architecture": "llama", "llama.context_length": 64}
    )
    assert (config["bos_token"], config["eos_token"], config["model_max_length"]) == ("<|user|>", "<|end|>", 64)


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces = ["▁", "a", "b", "ab", "▁ab", "ba"]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces]
    scores = [0.0, 0.0, 0.0, *[0.0] * 256, -10.0, -11.0, -12.0, -1.0, -2.0, -3.0]
    metadata = _metadata(
        model="llama",
        pre=None,
        tokens=tokens,
        scores=scores,
        token_type=[2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        merges=None,
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0,
    )
    content, config = tokenizer_files(metadata)
    tokenizer = Tokenizer.from_json(content, config)
    ids = tokenizer.encode("ab aba é")
    assert [tokens[i] for i in ids] == ["<s>", "▁ab", "▁ab", "a", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(ids) == "ab aba é"


def _sentencepiece(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's own rule: of all neighbours that make a piece, join those of the best piece, leftmost first."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        made = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not made:
            return parts
        i = min(made)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def test_sentencepiece_merges_equal_its_own_rule() -> None:
    words = [*"▁helowrdñ", "he", "ll", "el", "hell", "hello", "▁hello", "▁w", "or", "ld", "▁wor", "▁world", "lo", "▁h"]
    random.Random(7).shuffle(words)
    tokens = ["<unk>", "<s>", "</s>", *words]
    scores = {word: -float(i) for i, word in enumerate(words)}
    metadata = _metadata(
        model="llama",
        pre=None,
        merges=None,
        tokens=tokens,
        scores=[0.0] * 3 + list(scores.values()),
        token_type=[2, 3, 3, *[1] * len(words)],
        unknown_token_id=0,
        add_bos_token=False,
    )
    ours = tokenizers.Tokenizer.from_str(tokenizer_files(metadata)[0].decode())
    for text in ("hello world", "hell or hello", " world  held", "ñ old", "lollold hellworld"):
        assert ours.encode(text, add_special_tokens=False).tokens == _sentencepiece(text, scores)


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"model": "t5"}, UnsupportedModel, "'t5'"),
        ({"pre": "from-the-future"}, UnsupportedModel, "from-the-future"),
        ({"tokens": None}, CheckpointMismatch, "tokens"),
        ({"merges": None}, CheckpointMismatch, "merges"),
        ({"token_type": [1]}, CheckpointMismatch, "length"),
        ({"model": "llama"}, CheckpointMismatch, "scores"),
    ],
)
def test_what_cannot_be_used_is_named(changes: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        tokenizer_files(_metadata(**changes))


@pytest.mark.model
def test_smollm2_cuts_digits_one_by_one() -> None:
    files = open_model(str(demo_model_dir()))
    tokenizer = Tokenizer.from_json(files.tokenizer_json, files.tokenizer_config)
    assert tokenizer.encode("Hello 1234 world") == [19556, 216, 33, 34, 35, 36, 905]
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>") == [1, 4093, 198, 26843, 2]


@pytest.mark.model
def test_smollm2_equals_transformers_own_reading_of_the_directory() -> None:
    from transformers import PreTrainedTokenizerFast

    directory = demo_model_dir()
    reference = PreTrainedTokenizerFast.from_pretrained(str(directory))
    files = open_model(str(directory))
    tokenizer = Tokenizer.from_json(files.tokenizer_json, files.tokenizer_config)
    for text in TEXTS:
        ids = reference(text)["input_ids"]
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    rendered = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered.endswith("<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n")


def test_the_vocabulary_is_kept_whole() -> None:
    content, _ = tokenizer_files(_metadata())
    assert json.loads(content)["model"]["vocab"] == {token: i for i, token in enumerate(TOKENS)}
