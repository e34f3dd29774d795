"""How long a step may take before it counts as stuck, learnt from the steps of this process.

The time of a step grows with its tokens and with the context that they attend to, so steps are told apart by both, in
powers of two and of four. A kind of step that has been measured often enough may take several times as long as the
longest of late. Everything else has the fixed bound: a size not seen yet, and the first tokens of sequences that ask
for something new, since first uses compile, load and allocate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from common.events import SamplingParams
from engine_worker.sequence import Sequence, SequenceStatus
from engine_worker.step import StepPlan

_ENOUGH: Final = 8  # steps of a kind
_FORGET: Final = 1 / 64  # of a longest step, with each shorter one of its kind
_FAMILIAR_TOKENS: Final = 2  # drawn with a feature, until it is nothing new
_MOST_FEATURES: Final = 4096

Kind = tuple[int, int, bool]


@dataclass(slots=True)
class _Measured:
    count: int = 0
    longest_s: float = 0.0


class StepLimits:
    """Owned by the engine thread: `limit_s` before a step, `learn` after it."""

    def __init__(self, least_s: float, most_s: float, factor: float) -> None:
        """Limits lie between ``least_s`` and ``most_s``; with a ``factor`` of 0 all are ``most_s``."""
        self._least_s = least_s
        self._most_s = most_s
        self._factor = factor
        self._measured: dict[Kind, _Measured] = {}
        self._familiar: set[tuple[object, ...]] = set()
        self._unfamiliar: dict[Sequence, int] = {}  # with the number of tokens known when it came

    def limit_s(self, plan: StepPlan) -> float:
        """Seconds that this step may take."""
        expected_s = self.expected_s(plan)
        if expected_s is None or not self._factor:
            return self._most_s
        return min(self._most_s, max(self._least_s, self._factor * expected_s))

    def expected_s(self, plan: StepPlan) -> float | None:
        """The longest of late of steps like this one; None while too little is known of them."""
        for sequence in plan.admitted:
            if _features(sequence.sampling) not in self._familiar:
                self._unfamiliar[sequence] = sequence.num_tokens
        measured = self._measured.get(_kind(plan))
        if self._unfamiliar or measured is None or measured.count < _ENOUGH:
            return None
        return measured.longest_s

    def learn(self, plan: StepPlan, seconds: float) -> None:
        """The step took so long."""
        measured = self._measured.setdefault(_kind(plan), _Measured())
        measured.count += 1
        measured.longest_s = max(seconds, measured.longest_s * (1 - _FORGET))
        if self._unfamiliar:
            self._get_familiar()

    def _get_familiar(self) -> None:
        for sequence, began_with in list(self._unfamiliar.items()):
            num_drawn = sequence.num_tokens - began_with
            if num_drawn < _FAMILIAR_TOKENS and sequence.status is not SequenceStatus.FINISHED:
                continue
            del self._unfamiliar[sequence]
            if num_drawn:
                if len(self._familiar) >= _MOST_FEATURES:  # each grammar is one
                    self._familiar.clear()
                self._familiar.add(_features(sequence.sampling))


def _kind(plan: StepPlan) -> Kind:
    attended, scores = 0, False
    for item in plan.scheduled:
        attended += item.num_tokens * (item.start + item.num_tokens)
        scores |= item.num_tokens > 1 and item.sequence.scores_prompt
    return plan.num_tokens.bit_length(), attended.bit_length() // 2, scores


def _features(sampling: SamplingParams) -> tuple[object, ...]:
    """What of a request decides which code its steps run."""
    return (
        sampling.temperature > 0,
        sampling.top_p < 1,
        sampling.top_k > 0,
        sampling.min_p > 0,
        sampling.repetition_penalty != 1,
        bool(sampling.presence_penalty or sampling.frequency_penalty),
        bool(sampling.logit_bias),
        bool(sampling.allowed_token_ids),
        bool(sampling.bad_words_token_ids),
        sampling.min_tokens > 0,
        sampling.logprobs is not None,
        sampling.prompt_logprobs is not None,
        hash(sampling.grammar),
    )
