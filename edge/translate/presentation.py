"""How one answer is to look: written by the edge that admitted the request, read by whichever edge shows it."""

from __future__ import annotations

from typing import Final

import msgspec

CHAT: Final = "chat"
COMPLETION: Final = "completion"


class Presentation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Stored as msgpack in `EngineRequest.presentation`; grows only by fields with defaults."""

    endpoint: str  # CHAT or COMPLETION
    response_id: str  # "chatcmpl-..." or "cmpl-..."
    created: int  # unix time, seconds
    model: str  # the name shown in answers
    system_fingerprint: str = ""
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None  # alternatives asked for at each position; None = no log probabilities
    prompt_logprobs: bool = False  # shown in a field of their own
    echo: str = ""  # chat: text that precedes the output
    echo_prompts: tuple[str, ...] = ()  # completions with echo: the prompts' texts
    hide_output: bool = False  # completions that only score their prompt
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # "token_id:123" in place of token texts in logprobs
    tool_format: str = ""  # parser of tool calls; empty = no calls are expected
    tool_choice: str = "none"  # none, auto, required, named
    parallel_tool_calls: bool = True
    reasoning_format: str = ""  # parser of reasoning; empty = none is expected
    in_reasoning: bool = False  # the prompt ends inside the reasoning
    include_reasoning: bool = True


def encode_presentation(presentation: Presentation) -> bytes:
    return _encoder.encode(presentation)


def decode_presentation(payload: bytes) -> Presentation:
    """Raises `msgspec.DecodeError` when the bytes are not a presentation."""
    return _decoder.decode(payload)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Presentation)
