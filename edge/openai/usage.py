"""Token counts as clients read them."""

from __future__ import annotations

import msgspec

from common.events import Usage


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    reasoning_tokens: int


class UsageObject(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


def usage_object(usage: Usage, reasoning_tokens: int | None = None) -> UsageObject:
    """``reasoning_tokens``: None where the model does not reason."""
    details = msgspec.UNSET if reasoning_tokens is None else CompletionTokensDetails(reasoning_tokens=reasoning_tokens)
    return UsageObject(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=details,
    )
