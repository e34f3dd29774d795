"""One served model as the translation sees it: its card, tokenizer and template, and what follows from them.

Formats are chosen from the template's source: what a template renders for earlier turns is what the model writes.

==================================  ====================================
in the template                     tool format
==================================  ====================================
``<tool_call>``                     hermes (Qwen, Hermes, ...)
``[TOOL_CALLS]``                    mistral
``<|python_tag|>``, ``ipython``     llama3_json
no ``tools`` at all                 hermes, described in a system message
``tools`` in another notation       hermes
==================================  ====================================

A template with ``</think>`` belongs to a model that reasons in ``<think>`` tags. Both choices can be overridden.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from common.model_card import ModelCard
from common.tokenization.chat_template import ChatTemplate
from common.tokenization.tokenizer import Tokenizer
from edge.parsers.reasoning import THINK
from edge.parsers.tool_calls import HERMES, LLAMA3_JSON, MISTRAL


@dataclass(frozen=True)
class ServedModel:
    """Built once per card (by whoever caches tokenizers) and shared by all requests of the model.

    ``template`` is None when the card has no chat template; chat requests are then refused. ``tool_format``: of
    `TOOL_FORMATS`; ``reasoning_format``: of `REASONING_FORMATS`, or empty where the model does not reason in tags.
    """

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None
    tool_format: str
    reasoning_format: str
    renders_tools: bool  # the template itself describes tools and renders calls
    renders_developer: bool  # the template knows the role
    shows_tool_markup: bool  # the markup around calls consists of special tokens, which must not be skipped

    @classmethod
    def of_card(
        cls,
        card: ModelCard,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        tool_format: str | None = None,
        reasoning_format: str | None = None,
    ) -> ServedModel:
        """``tool_format`` and ``reasoning_format``: None chooses from the template."""
        source = card.chat_template
        chosen = _tool_format(source) if tool_format is None else tool_format
        markup = {MISTRAL: "[TOOL_CALLS]", LLAMA3_JSON: "<|python_tag|>"}.get(chosen, "<tool_call>")
        return cls(
            card=card,
            tokenizer=tokenizer,
            template=template,
            tool_format=chosen,
            reasoning_format=_reasoning_format(source) if reasoning_format is None else reasoning_format,
            renders_tools=_mentions_tools(source),
            renders_developer="developer" in source,
            shows_tool_markup=tokenizer.token_id(markup) in tokenizer.special_ids,
        )


def _mentions_tools(source: str) -> bool:
    return re.search(r"\btools\b", source) is not None


def _tool_format(source: str) -> str:
    if "<tool_call>" in source or not _mentions_tools(source):
        return HERMES
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    return LLAMA3_JSON if "<|python_tag|>" in source or "ipython" in source else HERMES


def _reasoning_format(source: str) -> str:
    return THINK if "</think>" in source else ""
