"""A model for tests of the edge: one token a byte, and an answer that everybody knows beforehand."""

from __future__ import annotations

import hashlib
from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from common.model_card import ModelCard
from common.tokenization.tokenizer import Tokenizer

NAME = "letters"
ALIAS = "team/letters-large"
MAX_MODEL_LEN = 4096
END = "<|end|>"
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def tokenizer_json() -> bytes:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer.to_str().encode()


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_json(tokenizer_json(), {"eos_token": END})


def card(name: str = NAME, alias: str = ALIAS) -> ModelCard:
    return ModelCard(
        name=name,
        served_names=(name, alias),
        weights_fingerprint=hashlib.sha256(name.encode()).hexdigest(),
        max_model_len=MAX_MODEL_LEN,
        vocab_size=tokenizer().vocab_size,
        eos_token_ids=(256,),
        tokenizer_blob=hashlib.sha256(tokenizer_json()).hexdigest(),
        tokenizer_config={"eos_token": END},
        chat_template=_TEMPLATE,
        created_s=1_700_000_000.0,
        capabilities=("logprobs",),
    )


def letter(i: int) -> str:
    """Output token number i."""
    return chr(ord("a") + i % 26)


def answer(num_tokens: int) -> str:
    """The text of an answer of so many tokens: abc...zabc..."""
    return "".join(map(letter, range(num_tokens)))
