"""From an owned request and its log to sequences that go on exactly where the log ends.

A new request is the case of an empty log. Prompt and logged tokens are the context of each open choice; detokeniser,
stop strings and counters are rebuilt by feeding these tokens again. Choices that have finished are not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from common.errors import LogCorrupt, StreamGap, WeightsChanged
from common.events import (
    ChoiceFinished,
    Ended,
    Failed,
    FinishReason,
    Milestone,
    PromptScored,
    Recorded,
    Started,
    Tokens,
)
from common.telemetry.logging import get_logger
from common.tokenization.tokenizer import Tokenizer
from common.transport.records import Owned
from engine_worker.live_choice import LiveChoice
from engine_worker.live_request import LiveRequest, Logged
from engine_worker.scheduler.stopping import ending_of
from engine_worker.sequence import Sequence

log: Final = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Resumed:
    """A request ready to run: ``sequences`` are those of its open choices, to be given to the engine."""

    live: LiveRequest
    sequences: tuple[Sequence, ...]


@dataclass(slots=True)
class _LoggedChoice:
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class _Replay:
    """What the log says, gathered in one pass."""

    choices: dict[int, _LoggedChoice] = field(default_factory=dict)
    cached_tokens: dict[int, int] = field(default_factory=dict)  # by choice
    scored_prompts: set[int] = field(default_factory=set)
    first_token_s: float | None = None
    weights_fingerprint: str = ""  # of whoever wrote the latest tokens

    def take(self, recorded: Recorded) -> None:
        match recorded.event:
            case Tokens() as event:
                choice = self._open(event.choice, recorded.n)
                choice.token_ids += event.token_ids
                choice.text.append(event.text)
                self.cached_tokens.setdefault(event.choice, event.cached_tokens)
                self.first_token_s = self.first_token_s or event.t
            case ChoiceFinished() as event:
                self._open(event.choice, recorded.n).finish_reason = event.finish_reason
            case PromptScored() as event:
                self.scored_prompts.add(event.prompt_index)
            case Started() as event:
                self.weights_fingerprint = event.weights_fingerprint
            case Milestone():
                pass
            case Ended() | Failed():
                raise LogCorrupt(f"event {recorded.n} is terminal, yet the request was to be run")

    def _open(self, index: int, n: int) -> _LoggedChoice:
        choice = self.choices.setdefault(index, _LoggedChoice())
        if choice.finish_reason is not None:
            raise LogCorrupt(f"event {n} for choice {index}, which has finished")
        return choice


class Resumer:
    """Makes runnable requests for one worker. Owned by the I/O loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        worker: str,
        max_model_len: int,
        next_seq_id: Callable[[], int],
        weights_fingerprint: str = "",
    ) -> None:
        """``next_seq_id``: numbers that are unique in this worker."""
        self._weights_fingerprint = weights_fingerprint
        self._tokenizer = tokenizer
        self._worker = worker
        self._max_model_len = max_model_len
        self._next_seq_id = next_seq_id

    def resume(self, owned: Owned, now: float) -> Resumed:
        """``owned`` as a running request. Its first new event is `Started`; whatever the log already decides (a choice
        whose last token ended it, an end without `Ended`) follows at once.

        Raises `LogCorrupt` (with `StreamGap`) when the log breaks its own rules, `WeightsChanged` when its tokens are
        of another model than this worker's.
        """
        replay = _replay(owned)
        is_open = len(replay.choices) < owned.request.num_choices or any(
            choice.finish_reason is None for choice in replay.choices.values()
        )
        if replay.choices and is_open and replay.weights_fingerprint != self._weights_fingerprint:
            raise WeightsChanged(
                f"the answer was begun with weights {replay.weights_fingerprint[:12]}, "
                f"this worker has {self._weights_fingerprint[:12]}"
            )
        live, sequences = self._rebuild(owned, replay, now)
        live.emit(
            Started(
                epoch=owned.epoch,
                t=now,
                worker=self._worker,
                resumed_from=owned.last_n,
                prompt_tokens=sum(map(len, owned.request.prompts)),
                queue_s=max(0.0, now - owned.request.arrival_s),
                weights_fingerprint=self._weights_fingerprint,
            )
        )
        self._note_trivial_prompts(live, replay, now)
        running = [sequence for sequence in sequences if self._feed_logged(live, sequence, replay, now)]
        live.end_if_nothing_is_open(now)
        return Resumed(live, tuple(running))

    def _rebuild(self, owned: Owned, replay: _Replay, now: float) -> tuple[LiveRequest, list[Sequence]]:
        request = owned.request
        unfinished = [
            index
            for index in range(request.num_choices)
            if index not in replay.choices or replay.choices[index].finish_reason is None
        ]
        skip = request.sampling.skip_special_tokens
        choices = {
            index: LiveChoice(index, request.sampling, self._tokenizer.detokenizer(skip_special_tokens=skip))
            for index in unfinished
        }
        logged = Logged(
            events=tuple(recorded.event for recorded in owned.events),
            completion_tokens=sum(len(choice.token_ids) for choice in replay.choices.values()),
            cached_tokens={i // request.n: count for i, count in replay.cached_tokens.items() if i % request.n == 0},
            scored_prompts=frozenset(replay.scored_prompts),
            finish_reasons=tuple(c.finish_reason for c in replay.choices.values() if c.finish_reason is not None),
        )
        live = LiveRequest(request, owned.epoch, choices, logged, claimed_s=now)
        live.timeline.first_token_s = replay.first_token_s
        return live, list(self._sequences(owned, replay, unfinished))

    def _sequences(self, owned: Owned, replay: _Replay, unfinished: list[int]) -> Iterator[Sequence]:
        request = owned.request
        wants_scores = request.sampling.prompt_logprobs is not None
        scored = set(replay.scored_prompts)
        for index in unfinished:
            prompt_index = index // request.n
            logged = replay.choices.get(index)
            yield Sequence(
                seq_id=self._next_seq_id(),
                request_id=request.request_id,
                choice=index,
                prompt_token_ids=request.prompts[prompt_index],
                sampling=request.sampling,
                max_model_len=self._max_model_len,
                output_token_ids=tuple(logged.token_ids) if logged else (),
                prompt_index=prompt_index,
                priority=request.priority,
                arrival_s=request.arrival_s,
                tenant=request.tenant,
                weight=request.weight,
                cache_salt=request.cache_salt,
                scores_prompt=wants_scores and prompt_index not in scored,
            )
            scored.add(prompt_index)  # one choice a prompt scores it

    def _feed_logged(self, live: LiveRequest, sequence: Sequence, replay: _Replay, now: float) -> bool:
        """Bring a choice to where its log ends. False when that is its end, which is logged then."""
        logged = replay.choices.get(sequence.choice)
        if logged is None or not logged.token_ids:
            return True
        choice = live.choices[sequence.choice]
        ending = ending_of(sequence)
        is_stopped = ending is not None and ending.reason is FinishReason.STOP
        last = len(logged.token_ids) - 1
        for i, token_id in enumerate(logged.token_ids):
            choice.take(token_id, is_stop_token=is_stopped and i == last)
        event = choice.tokens_event(live.epoch, now)  # logged by the predecessor
        if event is not None and event.text != "".join(logged.text):
            log.warning("text rebuilt from the log differs", request_id=live.request_id, choice=sequence.choice)
        if ending is not None:
            choice.finish(ending.reason, ending.stop_reason)
        if choice.is_open:
            return True
        live.close_choice(choice, now)
        return False

    def _note_trivial_prompts(self, live: LiveRequest, replay: _Replay, now: float) -> None:
        """A prompt of one token has nothing to score, but whoever asked for scores gets its event."""
        if live.request.sampling.prompt_logprobs is None:
            return
        for index, prompt in enumerate(live.request.prompts):
            if len(prompt) == 1 and index not in replay.scored_prompts:
                live.score_prompt(index, 0, (None,), now)


def _replay(owned: Owned) -> _Replay:
    replay = _Replay()
    for expected, recorded in enumerate(owned.events, start=1):
        if recorded.n != expected:
            raise StreamGap(expected=expected, got=recorded.n)
        replay.take(recorded)
    if len(owned.events) != owned.last_n:
        raise StreamGap(expected=len(owned.events) + 1, got=owned.last_n)
    return replay
