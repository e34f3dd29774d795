"""Plain data that passes between the scheduler, the runner and the output stage: one step's plan and its result."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from common.events import TokenLogprobs
from engine_worker.sequence import Sequence


class RequestAtFault(str):
    """Why a sequence failed, when that lies in the request itself: trying again would not help."""

    __slots__ = ("param",)
    param: str

    def __new__(cls, reason: str, param: str) -> RequestAtFault:
        """``param``: the field that is to blame; may be empty."""
        made = super().__new__(cls, reason)
        made.param = param
        return made


class ScheduledSequence(msgspec.Struct, frozen=True):
    """``num_tokens`` tokens of ``sequence`` are computed, the first at position ``start``.

    ``samples``: the last of them is the last known token, so one new token is drawn.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the runner shall compute. Decodes come first; the block tables already hold every slot that is written."""

    step: int
    scheduled: tuple[ScheduledSequence, ...]
    num_tokens: int
    preempted: tuple[Sequence, ...] = ()
    admitted: tuple[Sequence, ...] = ()  # first scheduled in this step (num_cached_tokens is set)


class SampledToken(msgspec.Struct, frozen=True):
    """One drawn token."""

    sequence: Sequence
    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log probabilities of the prompt tokens at positions ``start`` .. ``start + len(logprobs) - 1`` (start >= 1)."""

    sequence: Sequence
    start: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the runner answers: one token for each scheduled sequence that samples, in the plan's order."""

    sampled: tuple[SampledToken, ...]
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    failed: tuple[tuple[Sequence, str], ...] = ()  # confined to these sequences, with the reason
    timings_s: dict[str, float] = field(default_factory=dict)  # prepare, forward, sample


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one engine step did, for the output stage. Holds copies where the engine goes on changing things."""

    step: int
    t: float  # unix time at the end of the step
    num_tokens: int = 0  # computed in this step
    sampled: tuple[SampledToken, ...] = ()
    finished: tuple[Sequence, ...] = ()  # by EOS, stop token or length in this step
    admitted: tuple[Sequence, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    prefill_chunks: tuple[tuple[Sequence, int, int], ...] = ()  # (sequence, start, num_tokens) of unfinished prompts
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    failed: tuple[tuple[Sequence, str], ...] = ()
    timings_s: dict[str, float] = field(default_factory=dict)  # schedule, prepare, forward, sample
