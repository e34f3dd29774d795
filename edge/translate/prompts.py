"""Prompts to token ids: chats through the model's own template, completions as they come; all within the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from common.errors import ContextOverflow, InvalidRequest
from common.tokenization.control_tokens import RenderedPrompt
from edge.openai.decoding import echo
from edge.openai.sampling import GenerationFields
from edge.translate.bounds import check_token_ids, refuse
from edge.translate.messages import normalise_messages, with_tools_as_text
from edge.translate.model import ServedModel
from edge.translate.tools import Tool

REASONING_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_RESERVED_VARIABLES: Final = frozenset(
    {
        "chat_template", "tokenize", "messages", "tools", "documents", "add_generation_prompt",
        "continue_final_message", "bos_token", "eos_token", "unk_token", "pad_token", "raise_exception", "strftime_now",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a chat prompt is rendered from; the parts that chat completions and /tokenize share."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[Tool] = ()
    documents: Sequence[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None


def render_chat(chat: ChatPrompt, model: ServedModel) -> RenderedPrompt:
    """Raises `InvalidRequest` naming the field that is wrong."""
    if chat.chat_template is not None:
        raise InvalidRequest("chat_template: templates from clients are not run", param="chat_template")
    if model.template is None:
        raise InvalidRequest(f"the model {model.card.name} has no chat template; use /v1/completions", param="messages")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    variables = _template_variables(chat)
    messages = normalise_messages(chat.messages, renders_developer=model.renders_developer)
    tools: list[dict[str, Any]] | None = [tool.definition for tool in chat.tools] or None
    if not model.renders_tools:
        messages, tools = with_tools_as_text(messages, tools), None
    generates = not chat.continue_final_message if chat.add_generation_prompt is None else chat.add_generation_prompt
    return model.template.render(
        messages,
        tools=tools,
        documents=chat.documents,
        add_generation_prompt=generates,
        continue_final_message=chat.continue_final_message,
        variables=variables,
    )


def encode_chat(rendered: RenderedPrompt, model: ServedModel, *, add_special_tokens: bool) -> list[int]:
    """Token ids; only the template's own markers become control tokens."""
    token_ids = model.tokenizer.encode_rendered(rendered)
    if not add_special_tokens:
        return token_ids
    prefix = model.tokenizer.encode("", add_special_tokens=True)
    return token_ids if token_ids[: len(prefix)] == prefix else [*prefix, *token_ids]


def completion_prompts(
    prompt: str | list[Any] | None, model: ServedModel, *, add_special_tokens: bool, max_prompts: int
) -> list[list[int]]:
    """The four forms of ``prompt``: a text, texts, token ids, lists of token ids. Raises `InvalidRequest`."""
    if prompt is None or prompt == "" or prompt == []:
        raise InvalidRequest("prompt must not be empty", param="prompt")
    if isinstance(prompt, str):
        return [model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)]
    prompts = [prompt] if isinstance(prompt[0], int) else prompt
    if len(prompts) > max_prompts:
        raise InvalidRequest(f"prompt has {len(prompts)} entries, the limit is {max_prompts}", param="prompt")
    return [_one_prompt(item, f"prompt[{i}]", model, add_special_tokens) for i, item in enumerate(prompts)]


def truncated(token_ids: list[int], body: GenerationFields, model: ServedModel) -> list[int]:
    """``truncate_prompt_tokens`` of them, from the end that ``truncation_side`` names. -1 leaves room for one token."""
    keep = body.truncate_prompt_tokens
    limit = model.card.max_model_len
    side = body.truncation_side or model.card.tokenizer_config.get("truncation_side", "left")
    if side not in ("left", "right"):
        raise refuse("truncation_side", "must be left or right", side)
    if keep is None:
        return token_ids
    if keep == -1:
        keep = limit - 1
    if not 1 <= keep <= limit:
        raise refuse("truncate_prompt_tokens", f"must be -1, or from 1 to {limit}", keep)
    return token_ids[-keep:] if side == "left" else token_ids[:keep]


def room_left(prompts: Sequence[Sequence[int]], model: ServedModel, param: str) -> int:
    """Output tokens that fit behind the longest prompt. Raises `ContextOverflow` when there are none."""
    limit = model.card.max_model_len
    longest = max(map(len, prompts))
    if not min(map(len, prompts)):
        raise InvalidRequest(f"{param} must not be empty", param=param)
    if longest >= limit:
        verb = "have" if param == "messages" else "has"
        raise ContextOverflow(
            f"This model's maximum context length is {limit} tokens. However, your {param} {verb} {longest} tokens, "
            "which leaves no room for output. Please shorten it.",
            param=param,
        )
    return limit - longest


def _one_prompt(item: object, param: str, model: ServedModel, add_special_tokens: bool) -> list[int]:
    if isinstance(item, str):
        if not item:
            raise InvalidRequest(f"{param} must not be empty", param="prompt")
        return model.tokenizer.encode(item, add_special_tokens=add_special_tokens)
    if not isinstance(item, list):
        raise InvalidRequest(f"{param} must be text or a list of token ids, got {echo(item)}", param="prompt")
    if not item:
        raise InvalidRequest(f"{param} must not be empty", param="prompt")
    for token_id in item:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise InvalidRequest(f"{param}: token ids must be integers, got {echo(token_id)}", param="prompt")
    return list(check_token_ids("prompt", item, model.card.vocab_size))


def _template_variables(chat: ChatPrompt) -> dict[str, Any]:
    variables = dict(chat.chat_template_kwargs or {})
    for name in variables:
        if name in _RESERVED_VARIABLES:
            raise InvalidRequest(f"chat_template_kwargs must not contain {name}", param=f"chat_template_kwargs.{name}")
    effort = chat.reasoning_effort
    if effort is not None:
        if effort not in REASONING_EFFORTS:
            raise refuse("reasoning_effort", f"must be one of {', '.join(REASONING_EFFORTS)}", effort)
        variables.setdefault("reasoning_effort", effort)
        variables.setdefault("enable_thinking", effort != "none")
    return variables
