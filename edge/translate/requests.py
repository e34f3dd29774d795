"""Wire requests to `EngineRequest`: everything is checked here, before anything is enqueued.

Order: ``parse_*`` (bytes to a typed body, naming the field that is wrong), then the caller looks the model up by
``body.model``, then ``translate_*`` (body to engine request, against the model's card). Both are pure and may take
long for large bodies (tokenising, compiling a grammar), so call them off the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.events import EngineRequest
    from edge.openai.chat import ChatCompletionRequest
    from edge.openai.completions import CompletionRequest
    from edge.translate.model import ServedModel


@dataclass(frozen=True, slots=True)
class Admission:
    """What the edge knows of a request besides its body."""

    request_id: str
    arrival_s: float  # unix time
    deadline_s: float | None = None  # unix time
    tenant: str = ""
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
    raise NotImplementedError


def parse_completion(raw: bytes) -> CompletionRequest:
    """The body of /v1/completions. Raises `InvalidRequest`."""
    raise NotImplementedError


def translate_chat(
    body: ChatCompletionRequest, model: ServedModel, admission: Admission, limits: TranslationLimits
) -> Translated:
    """Raises `InvalidRequest` (with ``param``), `ContextOverflow` or `UnsupportedParameter`."""
    raise NotImplementedError


def translate_completion(
    body: CompletionRequest, model: ServedModel, admission: Admission, limits: TranslationLimits
) -> Translated:
    """Raises `InvalidRequest` (with ``param``), `ContextOverflow` or `UnsupportedParameter`."""
    raise NotImplementedError
