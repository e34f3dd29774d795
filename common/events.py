"""What is written to the log: the request, and everything that happens to it.

Structures are frozen, tagged and keyed (never positional), and grow only by fields with defaults, so that an old
reader ignores what it does not know and a new reader understands an old log. An unknown *kind* of event is refused.

A stream entry holds one event, msgpack-encoded, in its field ``d``. The event's number ``n`` (1, 2, 3, ... without a
gap) is the entry's id ``n-0`` and therefore not part of the payload: what is to be recorded (`OutputEvent`) and what
has been recorded (`Recorded`) are different types.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from common.errors import UnknownEvent

SCHEMA_VERSION: Final = 1


class FinishReason(StrEnum):
    """Why a choice ended, in the engine's words."""

    STOP = "stop"  # EOS, a stop token id or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    CANCELLED = "cancelled"


class CancelReason(StrEnum):
    """Why somebody does not want the answer any more."""

    CLIENT_DISCONNECTED = "client_disconnected"
    API = "api"
    DEADLINE = "deadline"
    ORPHANED = "orphaned"


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A constraint on the text, as the grammar engine takes it. ``kind``: "json_schema", "regex", "lark", "choice"."""

    kind: str
    source: str  # schema as JSON text, pattern, grammar text, or JSON list of strings
    param: str = ""  # the field of the request that asked for it


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request wants its tokens chosen. Validated at the edge; behind it nothing can be malformed.

    Order of application: grammar mask, logit_bias, allowed/bad tokens and min_tokens, repetition / frequency /
    presence penalties, temperature, top_k, top_p, min_p, draw.
    """

    max_tokens: int
    seed: int = 0  # unsigned 64 bit; always drawn at admission when the client sent none
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output tokens
    presence_penalty: float = 0.0  # over output tokens
    frequency_penalty: float = 0.0  # over output tokens
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()  # empty = all
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0  # EOS and stop token ids are masked until so many output tokens exist
    eos_token_ids: tuple[int, ...] = ()  # the model's own; not shown as stop_reason
    stop_token_ids: tuple[int, ...] = ()  # the client's
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None = none; k >= 0: the sampled token and the k most likely
    prompt_logprobs: int | None = None  # the same for prompt tokens
    grammar: Grammar | None = None


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One accepted request: everything a worker, a successor, an inspector or a replay needs.

    Choices are numbered prompt-major: ``choice = prompt_index * n + k``.
    """

    request_id: str
    model: str
    prompts: tuple[tuple[int, ...], ...]  # token ids; almost always one
    sampling: SamplingParams
    n: int = 1  # choices per prompt
    v: int = SCHEMA_VERSION
    priority: int = 0  # lower runs earlier
    arrival_s: float = 0.0  # unix time at the edge
    deadline_s: float | None = None  # unix time
    tenant: str = ""
    weight: float = 1.0  # the tenant's share of the model when others want it too, relative to theirs
    cache_salt: str = ""
    adapter: str = ""
    trace: dict[str, str] = msgspec.field(default_factory=dict)  # W3C traceparent / tracestate
    presentation: bytes = b""  # how the edge shapes the answer; opaque to everybody but edges

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Log probabilities at one position: of the token itself, and of the most likely ones in falling order."""

    logprob: float
    rank: int = 0  # 1 = the most likely
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens counted by the engine. Prompts are counted once, however many choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens, found in the prefix cache


class Started(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="started"):
    """A worker owns the request under a new epoch. ``resumed_from`` is the last event number before it, if any."""

    epoch: int
    t: float  # unix time
    worker: str
    resumed_from: int = 0
    prompt_tokens: int = 0
    queue_s: float = 0.0  # from arrival to this event
    weights_fingerprint: str = ""  # of the worker's model: whoever continues must have the same


class PromptScored(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="prompt"):
    """Log probabilities of a prompt's tokens; the first position has none."""

    epoch: int
    t: float
    prompt_index: int
    logprobs: tuple[TokenLogprobs | None, ...]


class Tokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="tokens"):
    """What one engine step (or several, coalesced) added to one choice."""

    epoch: int
    t: float
    choice: int
    token_ids: tuple[int, ...]
    text: str = ""  # complete UTF-8; may be empty while a character or a possible stop string is open
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token when asked for
    cached_tokens: int = 0  # on a choice's first event: prompt tokens found in the prefix cache


class Milestone(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="milestone"):
    """An internal event for the timeline; relays skip it.

    ``what``: prefill_chunk, preempted, resumed, handed_over; held_back and let_in (a request whose workers died more
    than once waits until it can run without others of that kind beside it).
    """

    epoch: int
    t: float
    what: str
    choice: int = 0
    detail: dict[str, int | float | str] = msgspec.field(default_factory=dict)


class ChoiceFinished(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="choice"):
    """One choice reached its end. ``text`` is what was held back until now."""

    epoch: int
    t: float
    choice: int
    finish_reason: FinishReason
    stop_reason: str | int | None = None  # the stop string or the client's stop token id
    text: str = ""


class Ended(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="ended"):
    """Terminal: every choice has finished. ``cancelled`` says why, if it was not the model that ended it."""

    epoch: int
    t: float
    usage: Usage
    cancelled: CancelReason | None = None


class Failed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="failed"):
    """Terminal: the request could not be completed. ``code`` is an error code of `common.errors`."""

    epoch: int
    t: float
    code: str
    message: str
    retryable: bool = False
    usage: Usage = Usage()
    param: str = ""  # the field of the request that is to blame


OutputEvent = Started | PromptScored | Tokens | Milestone | ChoiceFinished | Ended | Failed
TERMINAL: Final = (Ended, Failed)


class Recorded(msgspec.Struct, frozen=True):
    """An event with its position in the request's stream."""

    n: int
    event: OutputEvent


class Cancel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="cancel"):
    """Inbox entry: the owner of ``request_id`` shall end it."""

    request_id: str
    reason: CancelReason
    by: str = ""
    v: int = SCHEMA_VERSION


class Drain(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="drain"):
    """Inbox entry: the worker shall take nothing new; with ``handover`` release what it runs."""

    handover: bool = False
    v: int = SCHEMA_VERSION


InboxEvent = Cancel | Drain

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(EngineRequest)
_output_decoder = msgspec.msgpack.Decoder(OutputEvent)
_inbox_decoder = msgspec.msgpack.Decoder(InboxEvent)


def encode(event: EngineRequest | OutputEvent | InboxEvent) -> bytes:
    """msgpack of any event."""
    return _encoder.encode(event)


def decode_request(payload: bytes) -> EngineRequest:
    """Raises `UnknownEvent` when the payload is malformed or of a newer schema version."""
    try:
        request = _request_decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise UnknownEvent(f"not an engine request: {error}") from error
    if request.v > SCHEMA_VERSION:
        raise UnknownEvent(f"engine request of schema version {request.v}, this reader knows {SCHEMA_VERSION}")
    return request


def decode_output(payload: bytes) -> OutputEvent:
    """Raises `UnknownEvent` for unknown kinds and malformed payloads."""
    try:
        return _output_decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise UnknownEvent(f"not an output event: {error}") from error


def decode_inbox(payload: bytes) -> InboxEvent:
    """Raises `UnknownEvent` for unknown kinds and malformed payloads."""
    try:
        return _inbox_decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise UnknownEvent(f"not an inbox event: {error}") from error
