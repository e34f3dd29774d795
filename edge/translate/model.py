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
from functools import cached_property

from common.model_card import ModelCard
from common.tokenization.chat_template import ChatTemplate
from common.tokenization.tokenizer import Tokenizer
from edge.parsers.reasoning import THINK
from edge.parsers.tool_calls import HERMES, LLAMA3_JSON, MISTRAL


@dataclass(frozen=True)
class ServedModel:
    """Built once per card (by whoever caches tokenizers) and shared by all requests of the model.

    ``template`` is None when the card has no chat template; chat requests are then refused. The two formats override
    what the template suggests: ``tool_parser`` is one of `TOOL_FORMATS`, ``reasoning_parser`` one of
    `REASONING_FORMATS` or "none".
    """

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None
    tool_parser: str = ""
    reasoning_parser: str = ""

    @cached_property
    def tool_format(self) -> str:
        """How this model writes tool calls; of `TOOL_FORMATS`."""
        return self.tool_parser or _tool_format(self.card.chat_template)

    @cached_property
    def reasoning_format(self) -> str:
        """How this model marks its reasoning; empty where it does not."""
        chosen = self.reasoning_parser or _reasoning_format(self.card.chat_template)
        return "" if chosen == "none" else chosen

    @cached_property
    def renders_tools(self) -> bool:
        """The template itself describes tools and renders calls."""
        return _mentions_tools(self.card.chat_template)

    @cached_property
    def renders_developer(self) -> bool:
        """The template knows the role."""
        return "developer" in self.card.chat_template

    @cached_property
    def shows_tool_markup(self) -> bool:
        """The markup around calls consists of special tokens, which therefore must not be skipped."""
        markup = {MISTRAL: "[TOOL_CALLS]", LLAMA3_JSON: "<|python_tag|>"}.get(self.tool_format, "<tool_call>")
        return self.tokenizer.token_id(markup) in self.tokenizer.special_ids


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
