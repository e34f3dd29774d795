"""When a sequence ends by itself."""

from __future__ import annotations

from dataclasses import dataclass

from common.events import FinishReason
from engine_worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a sequence ends; ``stop_reason`` is the client's stop token id or stop string, where that is why."""

    reason: FinishReason
    stop_reason: str | int | None = None


def ending_of(sequence: Sequence) -> Ending | None:
    """How the tokens known so far end the sequence, or None when it goes on.

    A function of the sequence's tokens and parameters alone, so it also tells a successor that a resumed sequence
    has nothing left to do. Stop strings are text and no business of the engine.
    """
    if sequence.num_output_tokens > 0 and (ending := _stopped_by(sequence)) is not None:
        return ending
    return None if has_room(sequence) else Ending(FinishReason.LENGTH)


def has_room(sequence: Sequence) -> bool:
    """Whether one more token may be drawn: within max_tokens and the context."""
    return sequence.num_tokens < sequence.capacity and sequence.num_output_tokens < sequence.sampling.max_tokens


def _stopped_by(sequence: Sequence) -> Ending | None:
    sampling = sequence.sampling
    # Below min_tokens the sampler masks these tokens; only the end of a grammar overrides that.
    if sequence.num_output_tokens <= sampling.min_tokens and sampling.grammar is None:
        return None
    token_id = int(sequence.tokens[sequence.num_tokens - 1])
    if token_id in sampling.eos_token_ids and not sampling.ignore_eos:
        return Ending(FinishReason.STOP)
    if token_id in sampling.stop_token_ids:
        return Ending(FinishReason.STOP, token_id)
    return None
