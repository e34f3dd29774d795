"""Wire requests to `EngineRequest`: everything is checked here, before anything is enqueued.

Order: ``parse_*`` (bytes to a typed body, naming the field that is wrong), then the caller looks the model up by
``body.model``, then ``translate_*`` (body to engine request, against the model's card). Both are pure but for the
seed that they draw, and may take long for large bodies (tokenising, compiling a grammar): call them off the event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from common.errors import InvalidRequest, UnsupportedParameter
from common.events import EngineRequest, Grammar
from edge.openai.chat import ChatCompletionRequest
from edge.openai.completions import CompletionRequest
from edge.openai.decoding import decode_body, echo
from edge.openai.sampling import GenerationFields
from edge.translate.bounds import check_int, refuse
from edge.translate.constraints import NO_THINKING, Thinking, after_thinking, output_constraint
from edge.translate.messages import normalise_messages
from edge.translate.model import ServedModel
from edge.translate.parameters import check_parameters
from edge.translate.presentation import CHAT, COMPLETION, Presentation, encode_presentation
from edge.translate.prompts import (
    ChatPrompt,
    completion_prompts,
    encode_chat,
    render_chat,
    room_left,
    truncated,
)
from edge.translate.sampling import Budget, Reporting, output_budget, sampling_params
from edge.translate.tools import ToolPlan, calls_or, plan_tools, tool_grammar

DEFAULT_COMPLETION_TOKENS: Final = 16
MAX_SALT_CHARS: Final = 128
_INT64: Final = (-(2**63), 2**63 - 1)


@dataclass(frozen=True, slots=True)
class Admission:
    """What the edge knows of a request besides its body."""

    request_id: str
    arrival_s: float  # unix time
    deadline_s: float | None = None  # unix time
    tenant: str = ""
    weight: float = 1.0  # of the tenant
    priority: int | None = None  # from a header; wins over the body's
    trace: dict[str, str] = field(default_factory=dict)  # W3C traceparent / tracestate


@dataclass(frozen=True, slots=True)
class TranslationLimits:
    """Bounds of the edge on what one request may ask for, and its strictness."""

    compat: bool = False  # ignore unknown and unsupported parameters instead of refusing them
    max_choices: int = 128  # prompts x n
    max_prompts: int = 1024
    max_logprobs: int = 20
    max_stop_strings: int = 4


@dataclass(frozen=True, slots=True)
class Translated:
    """A request ready to be submitted. ``ignored``: parameters that compatible mode dropped, to be logged, counted."""

    request: EngineRequest
    stream: bool
    ignored: tuple[str, ...] = ()


def parse_chat(raw: bytes) -> ChatCompletionRequest:
    """The body of /v1/chat/completions. Raises `InvalidRequest`."""
    return decode_body(raw, ChatCompletionRequest)


def parse_completion(raw: bytes) -> CompletionRequest:
    """The body of /v1/completions. Raises `InvalidRequest`."""
    return decode_body(raw, CompletionRequest)


def is_plain(body: GenerationFields) -> bool:
    """Whether translating takes no longer than its text: nothing is to be compiled for it."""
    return body.response_format is None and body.structured_outputs is None


def is_plain_chat(body: ChatCompletionRequest) -> bool:
    """The same of a chat, whose tools may need a grammar."""
    return is_plain(body) and not body.tools


def translate_chat(
    body: ChatCompletionRequest, model: ServedModel, admission: Admission, limits: TranslationLimits
) -> Translated:
    """Raises `InvalidRequest` (with ``param``), `ContextOverflow` or `UnsupportedParameter`."""
    ignored = check_parameters(body.unknown_fields, compat=limits.compat)
    _check_shape(body, 1, limits)
    plan = plan_tools(body)
    rendered = render_chat(_chat_prompt(body, plan), model)
    token_ids = encode_chat(rendered, model, add_special_tokens=bool(body.add_special_tokens))
    token_ids = truncated(token_ids, body, model)
    room = room_left([token_ids], model, "messages")
    thinking = _thinking(body, rendered.text, model)
    logprobs = _chat_logprobs(body, limits)
    reporting = Reporting(
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(body, limits),
        grammar=_chat_grammar(body, plan, model, thinking),
        skip_special_tokens=body.skip_special_tokens and not (plan.callable and model.shows_tool_markup),
    )
    presentation = msgspec.structs.replace(
        _presentation(body, model, admission, CHAT),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs is not None,
        echo=_echoed_message(body),
        tool_format=model.tool_format if plan.callable else "",
        tool_choice=plan.choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_format=model.reasoning_format if thinking.is_possible else "",
        in_reasoning=thinking.is_open,
        include_reasoning=body.include_reasoning,
    )
    pieces = _Pieces((tuple(token_ids),), _chat_budget(body, room, model), reporting, presentation)
    return _assembled(body, model, admission, limits, pieces, ignored)


def translate_completion(
    body: CompletionRequest, model: ServedModel, admission: Admission, limits: TranslationLimits
) -> Translated:
    """Raises `InvalidRequest` (with ``param``), `ContextOverflow` or `UnsupportedParameter`."""
    ignored = check_parameters(body.unknown_fields, compat=limits.compat)
    _check_completion_only(body)
    prompts = completion_prompts(
        body.prompt,
        model,
        add_special_tokens=body.add_special_tokens is not False,
        max_prompts=limits.max_prompts,
    )
    _check_shape(body, len(prompts), limits)
    prompts = [truncated(token_ids, body, model) for token_ids in prompts]
    room = room_left(prompts, model, "prompt")
    scores_only = body.echo and body.max_tokens == 0
    asked = 1 if scores_only else body.max_tokens
    logprobs = _completion_logprobs(body, limits)
    reporting = Reporting(
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(body, limits, logprobs if body.echo else None),
        grammar=output_constraint(body),
        skip_special_tokens=body.skip_special_tokens,
    )
    presentation = msgspec.structs.replace(
        _presentation(body, model, admission, COMPLETION),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs is not None,
        echo_prompts=_echoed_prompts(body, prompts, model) if body.echo else (),
        hide_output=scores_only,
    )
    budget = output_budget(asked, "max_tokens", room, DEFAULT_COMPLETION_TOKENS)
    pieces = _Pieces(tuple(map(tuple, prompts)), budget, reporting, presentation)
    return _assembled(body, model, admission, limits, pieces, ignored)


@dataclass(frozen=True, slots=True)
class _Pieces:
    prompts: tuple[tuple[int, ...], ...]
    budget: Budget
    reporting: Reporting
    presentation: Presentation


def _assembled(
    body: GenerationFields,
    model: ServedModel,
    admission: Admission,
    limits: TranslationLimits,
    pieces: _Pieces,
    ignored: tuple[str, ...],
) -> Translated:
    sampling = sampling_params(
        body, model.card, model.tokenizer, pieces.budget, pieces.reporting, limits.max_stop_strings
    )
    priority = body.priority if admission.priority is None else admission.priority
    request = EngineRequest(
        request_id=admission.request_id,
        model=model.card.name,
        prompts=pieces.prompts,
        sampling=sampling,
        n=body.n,
        priority=check_int("priority", priority, *_INT64),
        arrival_s=admission.arrival_s,
        deadline_s=admission.deadline_s,
        tenant=admission.tenant,
        weight=admission.weight,
        cache_salt=_cache_salt(body.cache_salt),
        trace=admission.trace,
        presentation=encode_presentation(pieces.presentation),
    )
    return Translated(request, body.stream, ignored)


def _presentation(body: GenerationFields, model: ServedModel, admission: Admission, endpoint: str) -> Presentation:
    """What chat and completions have in common."""
    options = body.stream_options
    include_usage = bool(options and options.include_usage)
    prefix = "chatcmpl" if endpoint == CHAT else "cmpl"
    return Presentation(
        endpoint=endpoint,
        response_id=f"{prefix}-{admission.request_id}",
        created=int(admission.arrival_s),
        model=body.model or model.card.served_names[0],
        system_fingerprint=f"fp_{model.card.weights_fingerprint[:12]}",
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
        return_token_ids=body.return_token_ids,
        tokens_as_ids=body.return_tokens_as_token_ids,
    )


def _check_shape(body: GenerationFields, num_prompts: int, limits: TranslationLimits) -> None:
    """Number of choices, and options that only go with a stream."""
    check_int("n", body.n, 1, limits.max_choices)
    if body.n * num_prompts > limits.max_choices:
        raise InvalidRequest(
            f"n times the number of prompts must be at most {limits.max_choices}, got {body.n} x {num_prompts}",
            param="n",
        )
    options = body.stream_options
    if options is not None and not body.stream and (options.include_usage or options.continuous_usage_stats):
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")


def _check_completion_only(body: CompletionRequest) -> None:
    if body.suffix:
        raise UnsupportedParameter(
            f"suffix: this model does not fill in the middle (value {echo(body.suffix)})", param="suffix"
        )
    if body.best_of is not None and body.best_of != body.n:
        raise UnsupportedParameter(f"best_of must equal n ({body.n}), got {echo(body.best_of)}", param="best_of")


def _chat_prompt(body: ChatCompletionRequest, plan: ToolPlan) -> ChatPrompt:
    return ChatPrompt(
        messages=body.messages,
        tools=plan.shown,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
        reasoning_effort=body.reasoning_effort,
    )


def _chat_grammar(
    body: ChatCompletionRequest, plan: ToolPlan, model: ServedModel, thinking: Thinking
) -> Grammar | None:
    constraint = output_constraint(body)
    if constraint is not None and plan.is_forced:
        raise InvalidRequest(
            "tool_choice: a forced tool call cannot be combined with response_format or structured_outputs",
            param="tool_choice",
        )
    if constraint is None:
        return tool_grammar(plan, model.tool_format, thinking)
    param = "response_format" if body.response_format is not None else "structured_outputs"
    return after_thinking(calls_or(plan, model.tool_format, constraint, param), thinking, param)


def _chat_budget(body: ChatCompletionRequest, room: int, model: ServedModel) -> Budget:
    default = model.card.generation_defaults.max_tokens
    if body.max_completion_tokens is not None:
        return output_budget(body.max_completion_tokens, "max_completion_tokens", room, default)
    return output_budget(body.max_tokens, "max_tokens", room, default)


def _thinking(body: ChatCompletionRequest, prompt: str, model: ServedModel) -> Thinking:
    """Whether the answer may begin with reasoning: the prompt's end tells what the template decided.

    In a message that is to be continued, it may have been opened already.
    """
    if not model.reasoning_format:
        return NO_THINKING
    if body.continue_final_message:
        continued = _text_of_last(body)
        return Thinking(is_open=continued.rfind("<think>") > continued.rfind("</think>"))
    tail = prompt.rstrip()
    if tail.endswith("</think>"):
        return NO_THINKING
    is_open = tail.endswith("<think>")
    return Thinking(is_open=is_open, may_open=not is_open)


def _chat_logprobs(body: ChatCompletionRequest, limits: TranslationLimits) -> int | None:
    top = body.top_logprobs
    if top is not None:
        check_int("top_logprobs", top, 0, limits.max_logprobs)
        if top and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (top or 0) if body.logprobs else None


def _completion_logprobs(body: CompletionRequest, limits: TranslationLimits) -> int | None:
    return None if body.logprobs is None else check_int("logprobs", body.logprobs, 0, limits.max_logprobs)


def _prompt_logprobs(body: GenerationFields, limits: TranslationLimits, echoed: int | None = None) -> int | None:
    """Alternatives at each prompt position; ``echoed``: those that an echoed prompt is shown with."""
    asked = body.prompt_logprobs
    if asked is not None:
        check_int("prompt_logprobs", asked, 0, limits.max_logprobs)
    return max((count for count in (asked, echoed) if count is not None), default=None)


def _echoed_message(body: ChatCompletionRequest) -> str:
    return _text_of_last(body) if body.echo and body.messages[-1].get("role") == "assistant" else ""


def _text_of_last(body: ChatCompletionRequest) -> str:
    return str(normalise_messages(body.messages[-1:], renders_developer=True)[0]["content"])


def _echoed_prompts(body: CompletionRequest, prompts: Sequence[Sequence[int]], model: ServedModel) -> tuple[str, ...]:
    """A prompt's own text where the client sent one and nothing was cut from it."""
    given = [body.prompt] if isinstance(body.prompt, str) else body.prompt or []
    if body.truncate_prompt_tokens is None and all(isinstance(item, str) for item in given):
        return tuple(map(str, given))
    return tuple(model.tokenizer.decode(token_ids, skip_special_tokens=False) for token_ids in prompts)


def _cache_salt(salt: str | None) -> str:
    if salt is None:
        return ""
    if not salt or len(salt) > MAX_SALT_CHARS or any(character in "@/\\\0" for character in salt):
        raise refuse("cache_salt", f"must have 1 to {MAX_SALT_CHARS} characters, none of @ / \\ NUL", salt)
    return salt
