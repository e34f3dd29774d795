"""The text of one choice while it is generated: tokens in, events out."""

from __future__ import annotations

from common.events import ChoiceFinished, FinishReason, SamplingParams, TokenLogprobs, Tokens
from common.tokenization.detokenizer import Detokenizer
from common.tokenization.stop_strings import StopStringMatcher


class LiveChoice:
    """Detokenises, watches for stop strings and gathers what has not been logged yet. Owned by the I/O loop.

    A function of the tokens fed alone: a successor that feeds the logged tokens and drops the events stands exactly
    where its predecessor stood. Every counted token is in some `Tokens` event, also the one that ended the choice.
    """

    __slots__ = (
        "_cached_tokens",
        "_detokenizer",
        "_include_stop",
        "_logprobs",
        "_matcher",
        "_min_tokens",
        "_text",
        "_token_ids",
        "finish_reason",
        "index",
        "last_token_s",
        "num_tokens",
        "stop_reason",
    )

    def __init__(self, index: int, sampling: SamplingParams, detokenizer: Detokenizer) -> None:
        self.index = index
        self.num_tokens = 0
        self.last_token_s: float | None = None  # for measuring; kept by the output stage
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._detokenizer = detokenizer
        self._include_stop = sampling.include_stop_str_in_output
        self._matcher = StopStringMatcher(sampling.stop, include_stop=self._include_stop) if sampling.stop else None
        self._min_tokens = sampling.min_tokens
        self._token_ids: list[int] = []
        self._text = ""
        self._logprobs: list[TokenLogprobs] = []
        self._cached_tokens = 0

    @property
    def is_open(self) -> bool:
        return self.finish_reason is None

    def take(self, token_id: int, logprobs: TokenLogprobs | None = None, *, is_stop_token: bool = False) -> bool:
        """One more token. True when it completes a stop string: the choice has finished, later tokens are not its own.

        ``is_stop_token``: the engine ended the choice at this token (EOS or the client's), so it is not shown.
        """
        self.num_tokens += 1
        self._token_ids.append(token_id)
        if logprobs is not None:
            self._logprobs.append(logprobs)
        if is_stop_token and not self._include_stop:
            return False
        text = self._detokenizer.feed(token_id)
        if not text:
            return False
        if self._matcher is None or self.num_tokens <= self._min_tokens:
            self._text += text
            return False
        match = self._matcher.feed(text)
        self._text += match.text
        if match.stop is None:
            return False
        self.finish_reason, self.stop_reason = FinishReason.STOP, match.stop
        return True

    def note_cached(self, num_tokens: int) -> None:
        """So many prompt tokens came from the prefix cache; goes out with the choice's first event."""
        self._cached_tokens = num_tokens

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """The choice ends for another reason than a stop string. No effect when it has ended already."""
        if self.finish_reason is None:
            self.finish_reason, self.stop_reason = reason, stop_reason

    def tokens_event(self, epoch: int, t: float) -> Tokens | None:
        """What was taken since the last call, or None; from now on it counts as logged."""
        if not self._token_ids:
            return None
        event = Tokens(
            epoch=epoch,
            t=t,
            choice=self.index,
            token_ids=tuple(self._token_ids),
            text=self._text,
            logprobs=tuple(self._logprobs),
            cached_tokens=self._cached_tokens,
        )
        self._token_ids, self._text, self._logprobs, self._cached_tokens = [], "", [], 0
        return event

    def finished_event(self, epoch: int, t: float) -> ChoiceFinished:
        """The end, with the text that was held back. Call it once, after the last `tokens_event`."""
        assert self.finish_reason is not None, f"choice {self.index} has not finished"
        return ChoiceFinished(
            epoch=epoch,
            t=t,
            choice=self.index,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            text=self._matcher.flush() if self._matcher is not None else "",
        )
