"""What edges write: requests and cancellations."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import Any

from common.errors import IdempotencyConflict, LogCorrupt, Overloaded, TenantLimitReached
from common.events import (
    Cancel,
    CancelReason,
    ChoiceFinished,
    Ended,
    EngineRequest,
    FinishReason,
    OutputEvent,
    Recorded,
    Usage,
    decode_request,
    encode,
)
from common.request_state import RequestState, fold
from common.transport import scripts
from common.transport.client import LogClient
from common.transport.elsewhere import Elsewhere
from common.transport.frames import publish
from common.transport.keys import GROUP, QueueClass
from common.transport.log import read_all
from common.transport.memory import MemoryWatch
from common.transport.records import AdmissionLimits, CancelOutcome, Duplicate, Frame, RequestPhase, Submitted

_LONGEST_RETRY_AFTER_S = 60.0
_AFTER_DEADLINE_S = 3600  # an accepted request outlives its deadline by so long


def admitted_tokens(request: EngineRequest) -> int:
    """What a request counts for in admission: its prompt tokens and the most it may generate."""
    return sum(len(prompt) for prompt in request.prompts) + request.sampling.max_tokens * request.num_choices


class Submission:
    """Admits requests to the log and cancels them."""

    def __init__(self, client: LogClient) -> None:
        self._client = client
        self._memory = MemoryWatch(client)
        self._elsewhere = Elsewhere(client)

    async def watch_memory(self) -> None:
        """For processes that submit often: looks how full the log is, until cancelled, so that submissions need not."""
        await self._memory.run()

    async def submit(
        self,
        request: EngineRequest,
        *,
        body_fingerprint: str,
        limits: AdmissionLimits,
        edge_id: str,
        grace_s: float,
    ) -> Submitted | Duplicate:
        """Put a request into its model's queue; it is durable when this returns.

        ``grace_s``: how long the request may run without any reader before the worker cancels it. 0: the edge
        cancels it itself when its client goes (the worker still does when the edge dies); < 0: never.

        Raises `Overloaded` or `TenantLimitReached` (nothing was enqueued), `IdempotencyConflict` (same id, another
        fingerprint) and `LogUnavailable` (unknown whether it was enqueued: repeat with the same id).
        """
        keys, request_id = self._client.keys, request.request_id
        partition = keys.partition(request_id)
        queue_class = QueueClass.of_priority(request.priority)
        await self._memory.refuse_when_full()
        deadline_ms = "" if request.deadline_s is None else int(request.deadline_s * 1000)
        cost = admitted_tokens(request)
        others, held = await self._elsewhere.of(partition, request, cost, limits)
        arguments = (
            request_id,
            int(queue_class),
            encode(request),
            body_fingerprint,
            secrets.token_hex(8),
            edge_id,
            int(grace_s * 1000),
            deadline_ms,
            cost,
            limits.max_requests,
            limits.max_tokens,
            self._life_s(request),
            request.model,
            request.tenant,
            limits.max_tenant_requests,
            limits.max_tenant_tokens,
            *held,
            GROUP,
            request.weight,
        )
        reply = await self._client.run(
            scripts.SUBMIT,
            [
                keys.request(request_id),
                keys.load(partition, request.model),
                *keys.queues(partition, request.model),
                keys.backlog(partition, request.model, queue_class),
                keys.turns(partition, request.model, queue_class),
                *others,
            ],
            arguments,
            is_durable=True,
        )
        return _submitted(request_id, reply)

    async def cancel(self, request_id: str, reason: CancelReason, by: str) -> CancelOutcome:
        """Ask for the end of a request; repeating it is harmless.

        Raises `LogUnavailable`, and `InvalidRequest` for a malformed id.
        """
        while True:
            seen = await self._look(request_id)
            if seen is None:
                return CancelOutcome.UNKNOWN
            if seen.phase is RequestPhase.DONE:
                return CancelOutcome.OVER
            outcome = await self._try_cancel(seen, reason, by)
            if outcome is not None:
                return outcome

    def _life_s(self, request: EngineRequest) -> int:
        if request.deadline_s is None:
            return self._client.settings.request_ttl_s
        return max(int(request.deadline_s - time.time()), 0) + _AFTER_DEADLINE_S

    async def _look(self, request_id: str) -> _Seen | None:
        key = self._client.keys.request(request_id)
        values = await self._client.command("HMGET", key, "state", "epoch", "owner", "model", "spec", key=key)
        if values[0] is None:
            return None
        phase = RequestPhase(values[0].decode())
        log = await read_all(self._client, request_id) if phase is RequestPhase.QUEUED else []
        return _Seen(
            request_id=request_id,
            phase=phase,
            epoch=int(values[1]),
            owner=(values[2] or b"").decode(),
            model=values[3].decode(),
            request=decode_request(values[4]),
            log=log,
        )

    async def _try_cancel(self, seen: _Seen, reason: CancelReason, by: str) -> CancelOutcome | None:
        """One attempt under what was seen; None when the request has moved on meanwhile."""
        keys, settings = self._client.keys, self._client.settings
        partition = keys.partition(seen.request_id)
        payloads = [encode(event) for event in seen.ending(reason)]
        reply = await self._client.run(
            scripts.CANCEL,
            [
                keys.request(seen.request_id),
                keys.output(seen.request_id),
                keys.load(partition, seen.model),
                keys.inbox(partition, seen.owner),
                *keys.queues(partition, seen.model),
                *keys.backlogs(partition, seen.model),
            ],
            [
                GROUP,
                settings.retention_s,
                reason.value,
                by,
                seen.request_id,
                seen.phase.value,
                seen.epoch,
                len(seen.log),
                seen.owner,
                encode(Cancel(request_id=seen.request_id, reason=reason, by=by)),
                *payloads,
            ],
            is_durable=True,
        )
        word = reply[0].decode()
        if word == "changed":
            return None
        if word == "ended":
            first, edges = int(reply[1]), reply[2]
            frames = [Frame(seen.request_id, first + k, payload) for k, payload in enumerate(payloads)]
            await publish(self._client, [(edges, frames)])
        return CancelOutcome(word)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A request as it was looked at before a cancellation."""

    request_id: str
    phase: RequestPhase
    epoch: int
    owner: str
    model: str
    request: EngineRequest
    log: list[Recorded]

    def ending(self, reason: CancelReason) -> list[OutputEvent]:
        """The events that end it while it is queued (after a handover some of its choices may have output)."""
        state, epoch, now = fold(self.log), self.epoch + 1, time.time()
        finished: list[OutputEvent] = [
            ChoiceFinished(epoch=epoch, t=now, choice=choice, finish_reason=FinishReason.CANCELLED)
            for choice in range(self.request.num_choices)
            if state.choice(choice).finish_reason is None
        ]
        return [*finished, Ended(epoch=epoch, t=now, usage=self._usage(state), cancelled=reason)]

    def _usage(self, state: RequestState) -> Usage:
        return Usage(
            prompt_tokens=sum(len(prompt) for prompt in self.request.prompts),
            completion_tokens=sum(len(choice.token_ids) for choice in state.choices.values()),
            cached_tokens=sum(choice.cached_tokens for choice in state.choices.values()),
        )


def _submitted(request_id: str, reply: list[Any]) -> Submitted | Duplicate:
    match reply[0]:
        case b"ok":
            return Submitted(request_id)
        case b"dup":
            return Duplicate(request_id, RequestPhase(reply[1].decode()))
        case b"conflict":
            raise IdempotencyConflict(f"request {request_id} was accepted before with another body")
        case b"full":
            raise _overloaded(reply[1].decode(), int(reply[2]), float(reply[3]))
        case other:
            raise LogCorrupt(f"submit answered {other!r}")


def _overloaded(reason: str, depth: int, rate: float) -> Overloaded:
    """``rate``: finished requests per second. Some of ``depth`` have to end before there is room."""
    wait_s = min(max(depth / rate if rate > 0 else 1.0, 1.0), _LONGEST_RETRY_AFTER_S)
    if reason.startswith("tenant_"):
        message = f"You have {depth} requests queued or running, which reaches the limit of one key ({reason})."
        return TenantLimitReached(message, retry_after_s=wait_s, reason=reason)
    return Overloaded(f"{depth} requests are queued or running", retry_after_s=wait_s, reason=f"queue_{reason}")
