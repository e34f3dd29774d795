"""One owned request while it is generated: what happens to its sequences in, events with their numbers out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import HeadraceError
from common.events import (
    CancelReason,
    Ended,
    EngineRequest,
    Failed,
    FinishReason,
    Milestone,
    OutputEvent,
    PromptScored,
    TokenLogprobs,
    Usage,
)
from common.transport.records import AppendItem
from engine_worker.live_choice import LiveChoice


@dataclass(slots=True)
class Timeline:
    """When things happened to a request, unix seconds; None = not yet. Read when it ends."""

    claimed_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    num_chunks: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Logged:
    """What the log already holds of a request when its owner starts."""

    events: tuple[OutputEvent, ...] = ()
    completion_tokens: int = 0  # of finished and open choices
    cached_tokens: Mapping[int, int] | None = None  # by prompt
    scored_prompts: frozenset[int] = frozenset()
    finish_reasons: tuple[FinishReason, ...] = ()  # of the choices that have finished


class LiveRequest:
    """Gathers a request's events, numbers them and keeps them until the end. Owned by the I/O loop.

    Event n is ``events[n - 1]``. All of them stay in memory, because a failover may lose the tail of the log and then
    it is written again from here.
    """

    def __init__(
        self,
        request: EngineRequest,
        epoch: int,
        choices: Mapping[int, LiveChoice],
        logged: Logged | None = None,
        *,
        claimed_s: float,
    ) -> None:
        """``choices``: the open ones, at the position that ``logged`` says."""
        logged = logged or Logged()
        self.request = request
        self.epoch = epoch
        self.choices = dict(choices)
        self.events: list[OutputEvent] = list(logged.events)
        self.num_acknowledged = len(self.events)
        self.is_over = False
        self.cancelled: CancelReason | None = None
        self.finish_reasons: list[FinishReason] = list(logged.finish_reasons)
        self.timeline = Timeline(claimed_s)
        self._fresh: list[OutputEvent] = []
        self._completion_tokens = logged.completion_tokens
        self._cached_tokens = dict(logged.cached_tokens or {})
        self._scored_prompts = set(logged.scored_prompts)
        self._scores: dict[int, list[TokenLogprobs | None]] = {}

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def has_unlogged(self) -> bool:
        return self.num_acknowledged < len(self.events)

    @property
    def is_logged(self) -> bool:
        """Whether the log has acknowledged everything so far."""
        return not self._fresh and not self.has_unlogged

    @property
    def is_logged_to_the_end(self) -> bool:
        return self.is_over and self.is_logged

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=sum(map(len, self.request.prompts)),
            completion_tokens=self._completion_tokens,
            cached_tokens=sum(self._cached_tokens.values()),
        )

    def emit(self, event: OutputEvent) -> None:
        """An event that comes from outside: Started, a milestone."""
        if not self.is_over:
            self._fresh.append(event)

    def take(self, choice: LiveChoice, token_id: int, logprobs: TokenLogprobs | None, *, is_stop_token: bool) -> bool:
        """One more token of an open choice. True when it completes a stop string."""
        self._completion_tokens += 1
        return choice.take(token_id, logprobs, is_stop_token=is_stop_token)

    def admitted(self, choice: LiveChoice, num_cached_tokens: int) -> None:
        """The engine has begun with a choice. Cached tokens count once a prompt: those of its first choice."""
        choice.note_cached(num_cached_tokens)
        prompt_index, k = divmod(choice.index, self.request.n)
        if k == 0:
            self._cached_tokens.setdefault(prompt_index, num_cached_tokens)

    def close_choice(self, choice: LiveChoice, t: float) -> None:
        """A choice has its ``finish_reason``: log it, and with the last one the end of the request."""
        if self.is_over or choice.index not in self.choices:
            return
        self._flush(choice, t)
        self._fresh.append(choice.finished_event(self.epoch, t))
        assert choice.finish_reason is not None
        self.finish_reasons.append(choice.finish_reason)
        del self.choices[choice.index]
        if not self.choices:
            self._end(Ended(epoch=self.epoch, t=t, usage=self.usage, cancelled=self.cancelled), t)

    def end_if_nothing_is_open(self, t: float) -> None:
        """A log whose choices had all finished, but that lacks its end, gets it."""
        if not self.choices and not self.is_over:
            self._end(Ended(epoch=self.epoch, t=t, usage=self.usage, cancelled=self.cancelled), t)

    def cancel(self, reason: CancelReason, t: float) -> bool:
        """Finish every open choice as cancelled. False when the request was over already."""
        if self.is_over:
            return False
        self.cancelled = reason
        for choice in list(self.choices.values()):
            choice.finish(FinishReason.CANCELLED)
            self.close_choice(choice, t)
        self.end_if_nothing_is_open(t)
        return True

    def fail(self, error: HeadraceError, t: float) -> bool:
        """End the request with an error. False when it was over already."""
        if self.is_over:
            return False
        for choice in self.choices.values():
            self._flush(choice, t)
        failed = Failed(
            epoch=self.epoch,
            t=t,
            code=error.code,
            message=error.message,
            retryable=error.retryable,
            usage=self.usage,
            param=error.param or "",
        )
        self._end(failed, t)
        return True

    def score_prompt(self, prompt_index: int, start: int, logprobs: tuple[TokenLogprobs | None, ...], t: float) -> None:
        """Log probabilities of some prompt positions; logged as one event when all are there."""
        if prompt_index in self._scored_prompts or self.is_over:
            return
        size = len(self.request.prompts[prompt_index])
        scores = self._scores.setdefault(prompt_index, [None] * size)
        scores[start : start + len(logprobs)] = logprobs
        if all(score is not None for score in scores[1:]):
            self._scored_prompts.add(prompt_index)
            del self._scores[prompt_index]
            self._fresh.append(PromptScored(epoch=self.epoch, t=t, prompt_index=prompt_index, logprobs=tuple(scores)))

    def milestone(self, what: str, choice: int, t: float, **detail: int | float | str) -> None:
        """An internal event for the timeline."""
        self.emit(Milestone(epoch=self.epoch, t=t, what=what, choice=choice, detail=detail))

    def num_context_tokens(self, choice: LiveChoice) -> int:
        """Prompt and output of one choice so far."""
        return len(self.request.prompts[choice.index // self.request.n]) + choice.num_tokens

    def milestones(self) -> list[Milestone]:
        """The internal events of this epoch so far."""
        return [e for e in self.events if isinstance(e, Milestone) and e.epoch == self.epoch]

    def collect(self, t: float) -> None:
        """Number everything that has happened since the last call."""
        for choice in self.choices.values():
            self._flush(choice, t)
        self.events += self._fresh
        self._fresh.clear()

    def next_append(self) -> AppendItem:
        """The events that are not known to be in the log."""
        return AppendItem(
            request_id=self.request_id,
            epoch=self.epoch,
            first_n=self.num_acknowledged + 1,
            events=tuple(self.events[self.num_acknowledged :]),
            is_final=self.is_over and not self._fresh,
        )

    def _flush(self, choice: LiveChoice, t: float) -> None:
        event = choice.tokens_event(self.epoch, t)
        if event is not None:
            self._fresh.append(event)

    def _end(self, event: OutputEvent, t: float) -> None:
        self._fresh.append(event)
        self.is_over = True
        self.timeline.ended_s = t
