"""Span attributes in the words of the OpenTelemetry GenAI conventions (v0.1.0 of their own repository).

The constants in ``opentelemetry-semantic-conventions`` are deprecated, so the few that we use are spelled here. Prompts
and answers are never put on spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from common.events import EngineRequest, Usage
from common.telemetry.tracing import AttributeValue

PROVIDER: Final = "headrace"

OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
ERROR_TYPE: Final = "error.type"


def request_attributes(request: EngineRequest, operation: str, *, is_stream: bool) -> dict[str, AttributeValue]:
    """What was asked for. ``operation``: "chat", "text_completion", ..."""
    sampling = request.sampling
    attributes: dict[str, AttributeValue] = {
        "request.id": request.request_id,
        OPERATION_NAME: operation,
        PROVIDER_NAME: PROVIDER,
        REQUEST_MODEL: request.model,
        "gen_ai.request.stream": is_stream,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.seed": str(sampling.seed),  # unsigned 64 bit does not fit into an attribute's integer
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if sampling.frequency_penalty:
        attributes["gen_ai.request.frequency_penalty"] = sampling.frequency_penalty
    if sampling.presence_penalty:
        attributes["gen_ai.request.presence_penalty"] = sampling.presence_penalty
    if sampling.stop:
        attributes["gen_ai.request.stop_sequences"] = sampling.stop
    if request.n != 1:
        attributes["gen_ai.request.choice.count"] = request.n
    if request.tenant:
        attributes["headrace.tenant"] = request.tenant
    return attributes


def response_attributes(model: str, finish_reasons: Sequence[str], usage: Usage) -> dict[str, AttributeValue]:
    """What came out."""
    return {
        RESPONSE_MODEL: model,
        FINISH_REASONS: tuple(finish_reasons),
        INPUT_TOKENS: usage.prompt_tokens,
        OUTPUT_TOKENS: usage.completion_tokens,
        CACHED_TOKENS: usage.cached_tokens,
    }
