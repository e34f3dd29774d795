"""How many prompt tokens a step computes, and for whom."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_worker.config import SchedulerSettings
from engine_worker.sequence import Sequence


@dataclass(slots=True)
class _Grant:
    sequence: Sequence
    num_tokens: int
    wanted: int


@dataclass(slots=True)
class PrefillBudget:
    """One step's prompt tokens.

    Prompts are served in the order they ask, but those with more than ``long_threshold`` tokens to go share one half
    of the budget while there is anybody else to use the other: a short prompt never waits for a huge one, and a huge
    one moves in every step. What the short ones leave goes to the long ones in the end.
    """

    left: int
    long_threshold: int
    _long_left: int = field(init=False)
    _grants: list[_Grant] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._long_left = -(-self.left // 2)

    def grant(self, sequence: Sequence) -> int:
        """Tokens that ``sequence`` may compute now; may be 0."""
        wanted = sequence.num_tokens - sequence.num_computed_tokens
        num_tokens = min(wanted, self.available(wanted))
        if num_tokens:
            self.left -= num_tokens
            if wanted > self.long_threshold:
                self._long_left -= num_tokens
            self._grants.append(_Grant(sequence, num_tokens, wanted))
        return num_tokens

    def available(self, wanted: int) -> int:
        """What is left for a prompt that wants so many tokens."""
        return min(self.left, self._long_left) if wanted > self.long_threshold else self.left

    def settle(self) -> list[tuple[Sequence, int]]:
        """Everybody has asked: spend what is left, and say who got how much."""
        for item in self._grants:
            extra = min(self.left, item.wanted - item.num_tokens)
            item.num_tokens += extra
            self.left -= extra
        return [(item.sequence, item.num_tokens) for item in self._grants]


def prefill_budget(settings: SchedulerSettings, num_decodes: int) -> PrefillBudget:
    """The prompt tokens of a step that also computes ``num_decodes`` decodes."""
    left = settings.max_num_batched_tokens - num_decodes
    if num_decodes:
        left = min(left, settings.max_prefill_tokens_beside_decodes)
    return PrefillBudget(left=left, long_threshold=settings.long_prefill_token_threshold)
