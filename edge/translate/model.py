"""One served model as the translation sees it: its card, tokenizer and template, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.model_card import ModelCard
    from common.tokenization.chat_template import ChatTemplate
    from common.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """Built once per card (by whoever caches tokenizers) and shared by all requests of the model.

    ``template`` is None when the card has no chat template; chat requests are then refused.
    """

    card: ModelCard
    tokenizer: Tokenizer
    template: ChatTemplate | None
