"""The demo model's own tokenizer, and small ones of the other families."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, processors

from common.tokenization.tokenizer import Tokenizer
from tests.demo_model import demo_model_dir


def smollm2_json() -> bytes:
    """tokenizer.json of SmolLM2, as imported from its GGUF file."""
    return (demo_model_dir() / "tokenizer.json").read_bytes()


def smollm2_config() -> dict[str, Any]:
    config: dict[str, Any] = json.loads((demo_model_dir() / "tokenizer_config.json").read_text())
    return config


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
    return Tokenizer.from_json(smollm2_json(), smollm2_config())


@pytest.fixture(scope="session")
def smollm2_template() -> str:
    return (demo_model_dir() / "chat_template.jinja").read_text()


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
