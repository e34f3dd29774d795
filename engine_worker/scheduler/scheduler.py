"""Who computes how many tokens in the next step.

There is no prefill phase and no decode phase: each sequence has known tokens and computed tokens, and a step lets the
one catch up with the other. Order inside `Scheduler.schedule`:

1. A waiting sequence of a higher priority class that found no room last time takes it from the lowest running one.
2. Every running sequence with one token to go (the decodes) gets its slot, best rank first. Where no block is left,
   the running sequence of the worst rank is preempted: it loses its blocks and waits to be computed again, mostly
   from its own blocks, which stay in the prefix cache for as long as nobody needs them.
3. Running prompts get a chunk each from the prompt budget (see `budget`).
4. Waiting sequences are admitted while budget, seats and blocks last; not in a step that ran out of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ContextOverflow, EngineError
from common.events import FinishReason
from engine_worker.config import SchedulerSettings
from engine_worker.kv_cache.manager import KvCacheManager
from engine_worker.scheduler.budget import PrefillBudget, prefill_budget
from engine_worker.scheduler.policy import FairShare
from engine_worker.scheduler.prompt_sharing import PromptSharing
from engine_worker.scheduler.roster import Roster
from engine_worker.scheduler.stopping import Ending, ending_of, has_room
from engine_worker.sequence import Sequence, SequenceStatus
from engine_worker.step import SampledToken, ScheduledSequence, StepOutput, StepPlan, StepResult


@dataclass(slots=True)
class SchedulerCounters:
    """Since the start."""

    steps: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0  # computed for prompts and for contexts computed again
    generation_tokens: int = 0


class Scheduler:
    """Decides each step over the sequences of its ``roster``. Owned by the engine thread."""

    def __init__(self, settings: SchedulerSettings, kv_cache: KvCacheManager, max_model_len: int) -> None:
        self.counters = SchedulerCounters()
        self._settings = settings
        self._kv_cache = kv_cache
        self._max_model_len = max_model_len
        self._fair_share = FairShare()
        self.roster = Roster(kv_cache, self._fair_share)
        self._ended: list[Sequence] = []  # had ended before they came; reported by the next step
        self._found_no_room: Sequence | None = None
        self._sharing = PromptSharing(kv_cache)

    @property
    def has_work(self) -> bool:
        return bool(self.roster.running or self.roster.waiting or self._ended)

    def add(self, sequences: tuple[Sequence, ...]) -> None:
        """Queue sequences whose ``seq_id`` is unique. Raises `ContextOverflow`, before any is queued."""
        for sequence in sequences:
            if sequence.num_tokens > self._max_model_len or not self._kv_cache.can_ever_fit(sequence.capacity):
                raise _never_fits(sequence, self._max_model_len, self._kv_cache.num_blocks * self._kv_cache.block_size)
        for sequence in sequences:
            self.roster.enter(sequence)
            # A resumed sequence may have drawn its last token before its worker died.
            if sequence.num_output_tokens and (ending := ending_of(sequence)) is not None:
                self.roster.end(sequence, ending)
                self._ended.append(sequence)

    def cancel(self, request_id: str) -> tuple[Sequence, ...]:
        """End all sequences of a request as cancelled and return them; unknown ids give ()."""
        sequences = self.roster.of_request(request_id)
        for sequence in sequences:
            self.roster.end(sequence, Ending(FinishReason.CANCELLED))
        return sequences

    def finish(self, sequence: Sequence, ending: Ending) -> bool:
        """End one sequence from outside. False, with nothing changed, when it is not here any more."""
        if not self.roster.holds(sequence):
            return False
        self.roster.end(sequence, ending)
        return True

    def schedule(self) -> StepPlan:
        """The next step. Marks sequences as running or preempted and gives them the blocks that the step writes."""
        self.counters.steps += 1
        ousted = self._make_way()
        decodes, prefills, preempted = self._place_running()
        budget = prefill_budget(self._settings, len(decodes))
        for sequence in prefills:
            budget.grant(sequence)
        admitted = [] if preempted else self._admit(budget)
        scheduled = [
            ScheduledSequence(sequence, sequence.num_computed_tokens, 1, has_room(sequence)) for sequence in decodes
        ]
        scheduled += [_chunk(sequence, num_tokens) for sequence, num_tokens in budget.settle()]
        for item in scheduled:
            self._fair_share.charge(item.sequence.tenant, item.num_tokens, item.sequence.weight)
        num_tokens = sum(item.num_tokens for item in scheduled)
        self.counters.prompt_tokens += num_tokens - len(decodes)
        return StepPlan(
            step=self.counters.steps,
            scheduled=tuple(scheduled),
            num_tokens=num_tokens,
            preempted=tuple(ousted + preempted),
            admitted=tuple(admitted),
        )

    def commit(self, plan: StepPlan, output: StepOutput, now: float, timings_s: dict[str, float]) -> StepResult:
        """Move the sequences on by what was computed and drawn, end those that are done, and say what happened.

        Raises `EngineError` when the runner left out a token that the plan asked for.
        """
        for sequence, _ in output.failed:
            if self.roster.holds(sequence):
                self.roster.end(sequence, None)
        for scores in output.prompt_logprobs:
            scores.sequence.num_scored_tokens = scores.start + len(scores.logprobs)
        finished, self._ended = self._ended, []
        num_expected = self._commit_computed(plan, finished)
        sampled = self._commit_sampled(output.sampled, finished)
        if len(sampled) != num_expected:
            raise EngineError(f"step {plan.step}: {num_expected} tokens were to be drawn, {len(sampled)} came back")
        self.counters.generation_tokens += len(sampled)
        return StepResult(
            step=plan.step,
            t=now,
            num_tokens=plan.num_tokens,
            sampled=tuple(sampled),
            finished=tuple(finished),
            admitted=plan.admitted,
            preempted=plan.preempted,
            prefill_chunks=tuple(
                (item.sequence, item.start, item.num_tokens) for item in plan.scheduled if not item.samples
            ),
            prompt_logprobs=output.prompt_logprobs,
            failed=output.failed,
            timings_s=timings_s,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError when a block or a sequence is not accounted for exactly once."""
        self._kv_cache.check_integrity()
        self.roster.check_integrity()

    def _make_way(self) -> list[Sequence]:
        """Preempt the last of the running for a waiting sequence of a higher priority class that found no room."""
        claimant, self._found_no_room = self._found_no_room, None
        if claimant is None or claimant.status is not SequenceStatus.WAITING or not self.roster.running:
            return []
        victim = self.roster.running[-1]
        if victim.priority <= claimant.priority:
            return []
        self._preempt(victim)
        return [victim]

    def _place_running(self) -> tuple[list[Sequence], list[Sequence], list[Sequence]]:
        """(decodes, each with a slot; sequences with more to compute; sequences preempted to find the slots)."""
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        preempted: list[Sequence] = []
        index = 0
        while index < len(self.roster.running):
            sequence = self.roster.running[index]
            if sequence.num_tokens - sequence.num_computed_tokens > 1:
                prefills.append(sequence)  # blocks for all its tokens were given at admission
            elif self._find_slot(sequence, preempted):
                decodes.append(sequence)
            index += 1
        return decodes, prefills, preempted

    def _find_slot(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Room for the next token, at the expense of those behind; False when ``sequence`` itself was the last."""
        while not self._kv_cache.grow(sequence):
            victim = self.roster.running[-1]
            self._preempt(victim)
            preempted.append(victim)
            if victim is sequence:
                return False
        return True

    def _admit(self, budget: PrefillBudget) -> list[Sequence]:
        """Start waiting sequences in the order of the policy. Returns those that start for the first time."""
        admitted: list[Sequence] = []
        passed_over: list[Sequence] = []
        self._sharing.refresh()
        while budget.left and (sequence := self.roster.waiting.peek()) is not None:
            wanted = sequence.num_tokens - self._kv_cache.num_cached_tokens(sequence)
            if self._sharing.is_worth_waiting(sequence) or not budget.available(wanted):
                passed_over.append(self.roster.waiting.pop())
                continue
            if not self._start(sequence):
                self._found_no_room = sequence
                break
            budget.grant(sequence)
            if not sequence.num_preemptions:
                sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
                admitted.append(sequence)
        for sequence in passed_over:
            self.roster.waiting.push(sequence)
        return admitted

    def _start(self, sequence: Sequence) -> bool:
        # A block in reserve for each running sequence: admission shall not cause the next preemption.
        num_running = len(self.roster.running)
        if num_running >= self._settings.max_num_seqs or not self.roster.start(reserve=num_running):
            return False
        self._sharing.started(sequence)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.roster.preempt(sequence)
        self.counters.preemptions += 1

    def _commit_computed(self, plan: StepPlan, finished: list[Sequence]) -> int:
        """Count what was computed; returns how many tokens should have been drawn."""
        num_expected = 0
        for item in plan.scheduled:
            sequence = item.sequence
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # ended since it was scheduled
            sequence.num_computed_tokens = item.start + item.num_tokens
            self._kv_cache.commit(sequence)
            if item.samples:
                num_expected += 1
            elif sequence.num_computed_tokens == sequence.num_tokens:  # wanted no token, only its prompt's scores
                self.roster.end(sequence, Ending(FinishReason.LENGTH))
                finished.append(sequence)
        return num_expected

    def _commit_sampled(self, tokens: tuple[SampledToken, ...], finished: list[Sequence]) -> list[SampledToken]:
        kept = [token for token in tokens if token.sequence.status is SequenceStatus.RUNNING]
        for token in kept:
            sequence = token.sequence
            sequence.append(token.token_id)
            ending = ending_of(sequence)
            if ending is not None:
                self.roster.end(sequence, ending)
                finished.append(sequence)
        return kept


def _chunk(sequence: Sequence, num_tokens: int) -> ScheduledSequence:
    start = sequence.num_computed_tokens
    reaches_end = start + num_tokens == sequence.num_tokens
    return ScheduledSequence(sequence, start, num_tokens, reaches_end and has_room(sequence))


def _never_fits(sequence: Sequence, max_model_len: int, cache_tokens: int) -> ContextOverflow:
    return ContextOverflow(
        f"{sequence.num_tokens} tokens, up to {sequence.capacity} with the answer, cannot fit: the context holds "
        f"{max_model_len} tokens, the cache {cache_tokens}"
    )
