"""Small served models of several families: real tokenizers and templates, without weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from common.model_card import GenerationDefaults, ModelCard
from common.tokenization.chat_template import ChatTemplate
from common.tokenization.tokenizer import Tokenizer
from edge.translate.model import ServedModel

CONTEXT = 4096
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

PLAIN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = (
    "{% if tools %}{{ '<|im_start|>system\n<tools>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '</tools> answer with <tool_call><|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{% for key, value in call.function.arguments.items() %}"
    "{{ key }}={{ value }};{% endfor %}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
DEEPSEEK = PLAIN + "{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}{# </think> #}"
LLAMA = "{# tools <|python_tag|> ipython #}" + PLAIN
MISTRAL = "{# tools [TOOL_CALLS] #}" + PLAIN


@cache
def byte_tokenizer(*more_special: str) -> Tokenizer:
    """Every byte is a token, after the special tokens."""
    special = (*SPECIAL, *more_special)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in special])
    return Tokenizer.from_json(tokenizer.to_str().encode(), {"eos_token": "<|im_end|>"})


@cache
def served(template: str = PLAIN, **card: Any) -> ServedModel:
    """A model with this template and byte tokens; ``card``: other fields of its card."""
    tokenizer = byte_tokenizer("[TOOL_CALLS]") if template == MISTRAL else byte_tokenizer()
    fields: dict[str, Any] = {
        "name": "small",
        "served_names": ("small", "alias"),
        "weights_fingerprint": "0123456789abcdef",
        "max_model_len": CONTEXT,
        "vocab_size": tokenizer.vocab_size,
        "eos_token_ids": (2,),
        "tokenizer_blob": "blob",
        "chat_template": template,
    }
    model_card = ModelCard(**{**fields, **card})
    compiled = ChatTemplate(template, tokenizer.special_tokens, tokenizer.control_tokens) if template else None
    return ServedModel(card=model_card, tokenizer=tokenizer, template=compiled)


def with_defaults(**defaults: Any) -> ServedModel:
    """A model with a generation_config of its own."""
    return served(generation_defaults=GenerationDefaults(**defaults))
