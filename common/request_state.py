"""The fold: what is known of a request after any number of its events.

`apply` is total over `OutputEvent` and never performs I/O; edges, successors, ``inspect`` and ``replay`` all use it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import assert_never

from common.errors import LogCorrupt, StreamGap
from common.events import (
    CancelReason,
    ChoiceFinished,
    Ended,
    Failed,
    FinishReason,
    Milestone,
    PromptScored,
    Recorded,
    Started,
    TokenLogprobs,
    Tokens,
    Usage,
)


@dataclass(frozen=True, slots=True)
class ChoiceState:
    """One choice so far. ``text`` holds only what was logged as text (an open character or stop prefix is not)."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class RequestState:
    """A request after its first ``last_n`` events."""

    last_n: int = 0
    epoch: int = 0
    worker: str = ""
    takeovers: int = 0
    choices: dict[int, ChoiceState] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs | None, ...]] = field(default_factory=dict)
    usage: Usage | None = None
    cancelled: CancelReason | None = None
    failure: Failed | None = None

    @property
    def is_terminal(self) -> bool:
        return self.usage is not None or self.failure is not None

    def choice(self, index: int) -> ChoiceState:
        return self.choices.get(index, ChoiceState())


def apply(state: RequestState, recorded: Recorded) -> RequestState:
    """The state after one more event.

    Raises `StreamGap` when the event is not the next one, `LogCorrupt` when it breaks a rule of the log (an event
    after the terminal one, a smaller epoch, tokens for a finished choice).
    """
    if recorded.n != state.last_n + 1:
        raise StreamGap(expected=state.last_n + 1, got=recorded.n)
    if state.is_terminal:
        raise LogCorrupt(f"event {recorded.n} after the terminal event")
    event = recorded.event
    if event.epoch < state.epoch:
        raise LogCorrupt(f"event {recorded.n} of epoch {event.epoch} after epoch {state.epoch}")
    state = replace(state, last_n=recorded.n, epoch=event.epoch)
    match event:
        case Started():
            return replace(state, worker=event.worker, takeovers=state.takeovers + (1 if event.resumed_from else 0))
        case PromptScored():
            return replace(state, prompt_logprobs={**state.prompt_logprobs, event.prompt_index: event.logprobs})
        case Tokens():
            choice = _open_choice(state, event.choice, recorded.n)
            return _with_choice(
                state,
                event.choice,
                replace(
                    choice,
                    token_ids=choice.token_ids + event.token_ids,
                    text=choice.text + event.text,
                    logprobs=choice.logprobs + event.logprobs,
                    cached_tokens=choice.cached_tokens or event.cached_tokens,
                ),
            )
        case ChoiceFinished():
            choice = _open_choice(state, event.choice, recorded.n)
            return _with_choice(
                state,
                event.choice,
                replace(
                    choice,
                    text=choice.text + event.text,
                    finish_reason=event.finish_reason,
                    stop_reason=event.stop_reason,
                ),
            )
        case Ended():
            return replace(state, usage=event.usage, cancelled=event.cancelled)
        case Failed():
            return replace(state, failure=event)
        case Milestone():
            return state
        case _:
            assert_never(event)


def fold(recorded: list[Recorded]) -> RequestState:
    """The state after all of ``recorded``, from the start."""
    state = RequestState()
    for item in recorded:
        state = apply(state, item)
    return state


def _open_choice(state: RequestState, index: int, n: int) -> ChoiceState:
    choice = state.choice(index)
    if choice.finish_reason is not None:
        raise LogCorrupt(f"event {n} for choice {index}, which has finished")
    return choice


def _with_choice(state: RequestState, index: int, choice: ChoiceState) -> RequestState:
    return replace(state, choices={**state.choices, index: choice})
