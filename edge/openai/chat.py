"""POST /v1/chat/completions: the request, and the objects of the plain answer."""

from __future__ import annotations

from typing import Any

import msgspec

from edge.openai.sampling import GenerationFields
from edge.openai.usage import UsageObject


class ChatCompletionRequest(GenerationFields, frozen=True, kw_only=True):
    """Messages stay plain objects: templates may read keys that we do not know (`edge.translate.messages`)."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    documents: list[dict[str, Any]] | None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    function: FunctionCall
    type: str = "function"


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """``reasoning_content`` repeats ``reasoning`` for clients that know only the older name."""

    role: str = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[msgspec.Raw]
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    system_fingerprint: str
    service_tier: None = None
    prompt_logprobs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
