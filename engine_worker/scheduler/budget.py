"""How many prompt tokens a step computes, and for whom."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from engine_worker.config import SchedulerSettings
from engine_worker.sequence import Sequence

# A token whose log probabilities are wanted takes logits over the whole vocabulary and their ranking besides: measured
# 1.3 times the time of another one with a vocabulary of 49,000, and more with a larger one.
_SCORED_COST: Final = 2


@dataclass(slots=True)
class _Grant:
    sequence: Sequence
    num_tokens: int
    wanted: int
    cost: int  # of each token


@dataclass(slots=True)
class PrefillBudget:
    """One step's prompt tokens.

    Prompts are served in the order they ask, but those with more than ``long_threshold`` tokens to go share one half
    of the budget while there is anybody else to use the other: a short prompt never waits for a huge one, and a huge
    one moves in every step. What the short ones leave goes to the long ones in the end.

    Tokens that are scored count double, so that steps with them are about as long as those without.
    """

    left: int
    long_threshold: int
    _long_left: int = field(init=False)
    _grants: list[_Grant] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._long_left = -(-self.left // 2)

    def grant(self, sequence: Sequence) -> int:
        """Tokens that ``sequence`` may compute now; 0 only when nothing is left for it."""
        wanted = sequence.num_tokens - sequence.num_computed_tokens
        cost = _SCORED_COST if sequence.scores_prompt else 1
        available = self.available(wanted)
        num_tokens = min(wanted, -(-available // cost))
        if num_tokens:
            spent = min(num_tokens * cost, available)
            self.left -= spent
            if wanted > self.long_threshold:
                self._long_left -= spent
            self._grants.append(_Grant(sequence, num_tokens, wanted, cost))
        return num_tokens

    def available(self, wanted: int) -> int:
        """What is left for a prompt that wants so many tokens."""
        return min(self.left, self._long_left) if wanted > self.long_threshold else self.left

    def settle(self) -> list[tuple[Sequence, int]]:
        """Everybody has asked: spend what is left, and say who got how much."""
        for item in self._grants:
            extra = min(self.left // item.cost, item.wanted - item.num_tokens)
            item.num_tokens += extra
            self.left -= extra * item.cost
        return [(item.sequence, item.num_tokens) for item in self._grants]


def prefill_budget(settings: SchedulerSettings, num_decodes: int) -> PrefillBudget:
    """The prompt tokens of a step that also computes ``num_decodes`` decodes."""
    left = settings.step_tokens - num_decodes
    if num_decodes:
        left = min(left, settings.chunk_tokens)
    return PrefillBudget(left=left, long_threshold=settings.long_prefill_token_threshold)
