"""POST /v1/completions: the request, and the objects of the plain answer."""

from __future__ import annotations

from typing import Any

import msgspec

from edge.openai.sampling import GenerationFields
from edge.openai.usage import UsageObject


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """``prompt``: text, texts, token ids, or lists of token ids; told apart in `edge.translate.prompts`."""

    prompt: str | list[Any] | None = None
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Four lists of one length, one entry a token. A prompt's first token has neither logprob nor alternatives."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject
    system_fingerprint: str
