"""From step results to the log: detokenise, watch for stop strings, append.

One task writes, so the events of a request keep their order; while an append is under way the results of further
steps gather and go out together with the next one. Order of what happens for one batch:

1. take the step results, feed the tokens to their choices, tell the engine which sequences hit a stop string;
2. number the new events, one append call for all requests;
3. settle: forget what has ended or was fenced, end what somebody cancelled, append again what a failover lost.

Nothing is undone: an append that failed is repeated as it is, which the log answers correctly in every case.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from common.errors import EngineError, HeadraceError, InvalidRequest, LogUnavailable
from common.events import CancelReason, FinishReason
from common.telemetry.logging import get_logger
from common.transport.records import AppendItem, AppendOutcome, AppendStatus
from engine_worker.handoff import Commands, Drop, Finish, Refused, StepReport, StepReports
from engine_worker.live_choice import LiveChoice
from engine_worker.live_request import LiveRequest
from engine_worker.reporting import Reporting
from engine_worker.resume import Resumed
from engine_worker.sequence import Sequence as EngineSequence
from engine_worker.step import RequestAtFault, StepResult

log: Final = get_logger(__name__)

_FIRST_BACKOFF_S: Final = 0.05
_MAX_BACKOFF_S: Final = 2.0


class Log(Protocol):
    """The part of `common.transport.ownership.Ownership` that writes."""

    async def append(self, items: Sequence[AppendItem]) -> list[AppendOutcome]: ...

    async def release(self, request_id: str) -> bool: ...


class OutputStage:
    """Holds every owned request from adoption to its last acknowledged event. Owned by the I/O loop."""

    def __init__(self, ownership: Log, commands: Commands, reports: StepReports, reporting: Reporting) -> None:
        self.live: dict[str, LiveRequest] = {}
        self.room_changed = asyncio.Event()
        """Set whenever a sequence or a request goes; whoever waits for it clears it."""
        self._ownership = ownership
        self._commands = commands
        self._reports = reports
        self._reporting = reporting
        self._by_seq: dict[int, tuple[LiveRequest, LiveChoice]] = {}
        self._preempted: set[int] = set()
        self._dirty: dict[str, LiveRequest] = {}
        self._wake = asyncio.Event()
        self._is_stopping = False

    @property
    def num_sequences(self) -> int:
        """Open choices of all requests here."""
        return len(self._by_seq)

    @property
    def num_yielding(self) -> int:
        """Open choices that give their seat to a request of the highest priority class."""
        return sum(live.request.priority >= 0 for live, _ in self._by_seq.values())

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens of these choices: what the KV cache holds, or will soon."""
        return sum(live.num_context_tokens(choice) for live, choice in self._by_seq.values())

    def wake(self) -> None:
        """There are reports to take, or requests with something to write."""
        self._wake.set()

    def adopt(self, resumed: Resumed) -> None:
        """A request is owned from now on; it replaces an earlier epoch of itself."""
        live = resumed.live
        old = self.live.get(live.request_id)
        if old is not None:
            self._drop(old)
        self.live[live.request_id] = live
        for sequence in resumed.sequences:
            self._by_seq[sequence.seq_id] = (live, live.choices[sequence.choice])
        self._touch(live)

    def cancel(self, request_id: str, reason: CancelReason) -> None:
        """End a request because nobody wants it any more. Unknown and ended ones are a no-op."""
        live = self.live.get(request_id)
        if live is not None and live.cancel(reason, time.time()):
            self._reporting.cancelled(reason)
            self._release_sequences(live)

    def milestone(self, live: LiveRequest, what: str) -> None:
        """An internal event for the timeline of a request that is held here."""
        live.milestone(what, 0, time.time())
        self._touch(live)

    def fail(self, request_id: str, error: HeadraceError) -> None:
        """End a request with an error. Unknown and ended ones are a no-op."""
        live = self.live.get(request_id)
        if live is not None and live.fail(error, time.time()):
            log.warning("request failed", request_id=request_id, code=error.code, reason=error.message)
            self._release_sequences(live)

    async def run(self) -> None:
        """Write until `stop`, then once more what is left. Raises `LogUnavailable` only then."""
        while not self._is_stopping:
            await self._wake.wait()
            self._wake.clear()
            await self._write_all()
        await self._write_all()

    def stop(self) -> None:
        """Let `run` end after what has been reported."""
        self._is_stopping = True
        self._wake.set()

    async def hand_over(self) -> None:
        """Write what is there and give every request back to the queue. The engine has halted and `run` has ended.

        Raises `LogUnavailable`; others take over when the lease is gone.
        """
        for live in list(self.live.values()):
            self.milestone(live, "handed_over")
        await self._write_all()
        for live in list(self.live.values()):
            if await self._ownership.release(live.request_id):
                self._reporting.handed_over()
            self._forget(live)

    async def _write_all(self) -> None:
        self._absorb(self._reports.take_all())
        while self._dirty:
            await self._write()
            self._absorb(self._reports.take_all())
        self._reports.all_out()

    async def _write(self) -> None:
        batch, self._dirty = self._dirty, {}
        now = time.time()
        items: list[AppendItem] = []
        for live in batch.values():
            live.collect(now)
            if live.has_unlogged:
                items.append(live.next_append())
        if not items:
            return
        started = time.perf_counter()
        outcomes = await self._append(items)
        self._reporting.appended(items, time.perf_counter() - started)
        for item, outcome in zip(items, outcomes, strict=True):
            self._settle(item, outcome)

    async def _append(self, items: Sequence[AppendItem]) -> list[AppendOutcome]:
        """Repeats the call until the log has answered it."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                return await self._ownership.append(items)
            except LogUnavailable as error:
                self._reporting.log_failed()
                if self._is_stopping:
                    raise
                log.warning("append will be repeated", error=error.message, requests=len(items), backoff_s=backoff_s)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _settle(self, item: AppendItem, outcome: AppendOutcome) -> None:
        live = self.live.get(item.request_id)
        if live is None or live.epoch != item.epoch:
            return  # replaced while the append was under way
        match outcome.status:
            case AppendStatus.FENCED:
                if not item.is_final:  # the reply to a final append may have been lost: then it is merely over
                    log.info("request is no longer ours", request_id=live.request_id, epoch=live.epoch)
                    self._reporting.fenced()
                self._drop(live)
                return
            case AppendStatus.GAP:
                log.warning("log lost its tail", request_id=live.request_id, length=outcome.length)
                live.num_acknowledged = min(outcome.length, live.num_acknowledged)
                self._touch(live)
            case AppendStatus.APPENDED | AppendStatus.DUPLICATE:
                live.num_acknowledged = item.first_n - 1 + len(item.events)
        if outcome.cancel is not None:
            self.cancel(live.request_id, outcome.cancel)
        if live.is_logged_to_the_end:
            self._forget(live)
            self._reporting.ended(live)

    def _absorb(self, reports: Iterable[StepReport]) -> None:
        for report in reports:
            if isinstance(report, Refused):
                self.fail(report.request_id, report.error)
            else:
                self._absorb_step(report)

    def _absorb_step(self, result: StepResult) -> None:
        self._reporting.stepped(result)
        for sequence in result.admitted:
            self._note_admitted(sequence, result.t)
        self._note_milestones(result)
        stopped = {s.seq_id for s in result.finished if s.finish_reason is FinishReason.STOP}
        self._take_tokens(result, stopped)
        for scores in result.prompt_logprobs:
            found = self._by_seq.get(scores.sequence.seq_id)
            if found is not None:
                found[0].score_prompt(scores.sequence.prompt_index, scores.start, scores.logprobs, result.t)
                self._touch(found[0])
        for sequence in result.finished:
            found = self._by_seq.get(sequence.seq_id)
            if found is not None and sequence.finish_reason is not None:
                found[1].finish(sequence.finish_reason, sequence.stop_reason)
                self._close(sequence, *found, result.t)
        for sequence, reason in result.failed:
            if sequence.seq_id in self._by_seq:
                self.fail(sequence.request_id, _error(reason))

    def _take_tokens(self, result: StepResult, stopped: set[int]) -> None:
        """The hot path: once a token."""
        by_seq, dirty, t = self._by_seq, self._dirty, result.t
        intervals: list[float] = []
        for sampled in result.sampled:
            seq_id = sampled.sequence.seq_id
            found = by_seq.get(seq_id)
            if found is None:
                continue  # drawn before the engine heard that nobody wants it
            live, choice = found
            if choice.last_token_s is not None:
                intervals.append(t - choice.last_token_s)
            choice.last_token_s = live.timeline.last_token_s = t
            if live.timeline.first_token_s is None:
                live.timeline.first_token_s = t
            dirty[live.request_id] = live
            if live.take(choice, sampled.token_id, sampled.logprobs, is_stop_token=seq_id in stopped):
                self._commands.put(Finish(sampled.sequence, str(choice.stop_reason)))
                self._close(sampled.sequence, live, choice, t)
        self._reporting.token_intervals(intervals)

    def _note_admitted(self, sequence: EngineSequence, t: float) -> None:
        found = self._by_seq.get(sequence.seq_id)
        if found is not None:
            live, choice = found
            live.admitted(choice, sequence.num_cached_tokens)
            live.timeline.scheduled_s = live.timeline.scheduled_s or t

    def _note_milestones(self, result: StepResult) -> None:
        for sequence, start, num_tokens in result.prefill_chunks:
            found = self._by_seq.get(sequence.seq_id)
            if found is not None:
                found[0].milestone("prefill_chunk", sequence.choice, result.t, start=start, num_tokens=num_tokens)
                found[0].timeline.num_chunks += 1
                self._touch(found[0])
        for sequence in result.preempted:
            found = self._by_seq.get(sequence.seq_id)
            if found is not None:
                found[0].milestone("preempted", sequence.choice, result.t)
                found[0].timeline.num_preemptions += 1
                self._preempted.add(sequence.seq_id)
                self._reporting.computed_again(found[0].num_context_tokens(found[1]))
                self._touch(found[0])
        if self._preempted:
            self._note_resumed(result)

    def _note_resumed(self, result: StepResult) -> None:
        """A preempted sequence has been computed again when it draws its next token."""
        self._preempted &= self._by_seq.keys()
        for sampled in result.sampled:
            if sampled.sequence.seq_id in self._preempted:
                self._preempted.discard(sampled.sequence.seq_id)
                live, choice = self._by_seq[sampled.sequence.seq_id]
                live.milestone("resumed", choice.index, result.t)

    def _close(self, sequence: EngineSequence, live: LiveRequest, choice: LiveChoice, t: float) -> None:
        del self._by_seq[sequence.seq_id]
        live.close_choice(choice, t)
        self.room_changed.set()
        self._touch(live)

    def _touch(self, live: LiveRequest) -> None:
        self._dirty[live.request_id] = live
        self._wake.set()

    def _release_sequences(self, live: LiveRequest) -> None:
        """A request is over before its sequences are: the engine drops them."""
        self._commands.put(Drop(live.request_id))
        self._unlink(live)
        self._touch(live)

    def _drop(self, live: LiveRequest) -> None:
        """A request is not ours any more."""
        self._commands.put(Drop(live.request_id))
        self._unlink(live)
        self._forget(live)

    def _forget(self, live: LiveRequest) -> None:
        self.live.pop(live.request_id, None)
        self._dirty.pop(live.request_id, None)
        self.room_changed.set()

    def _unlink(self, live: LiveRequest) -> None:
        gone = [seq_id for seq_id, (owner, _) in self._by_seq.items() if owner is live]
        for seq_id in gone:
            del self._by_seq[seq_id]
        self.room_changed.set()


def _error(reason: str) -> HeadraceError:
    """What a failed sequence is to its client: its own mistake, or ours that another attempt may not meet."""
    if isinstance(reason, RequestAtFault):
        return InvalidRequest(str(reason), param=reason.param or None)
    return EngineError(reason)
