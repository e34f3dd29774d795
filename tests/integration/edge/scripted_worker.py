"""The engine's part played from a script: real ownership, leases and appends, tokens that are known beforehand.

An answer is the alphabet, one letter a token, ``max_tokens`` of them. What a prompt says changes it: ``FAIL-NOW`` fails
the request at once, ``FAIL-LATER`` after three tokens. One step gives every running request ``tokens_a_step`` tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

from common.errors import LogUnavailable
from common.events import (
    CancelReason,
    ChoiceFinished,
    Ended,
    Failed,
    FinishReason,
    OutputEvent,
    Started,
    Tokens,
    Usage,
)
from common.transport import (
    AppendItem,
    AppendOutcome,
    AppendStatus,
    LogClient,
    Owned,
    Ownership,
    RedisSettings,
    Registry,
)
from tests.integration.edge import letters_model


@dataclass
class _Running:
    owned: Owned
    text: str
    n: int
    produced: int
    is_started: bool = False
    cancel: CancelReason | None = None

    @property
    def budget(self) -> int:
        return self.owned.request.sampling.max_tokens


@dataclass
class ScriptedWorker:
    """Runs in the test's own event loop between `start` and `stop`."""

    settings: RedisSettings
    name: str = "scripted"
    step_s: float = 0.002
    tokens_a_step: int = 1
    takes_over: bool = False  # the requests of workers that died
    lease_s: float = 60.0
    pause_at: int | None = None  # tokens of a choice, after which a request stands still
    ended: dict[str, CancelReason | None] = field(default_factory=dict)  # every request that came to its end here
    seen: list[Owned] = field(default_factory=list)

    async def start(self) -> ScriptedWorker:
        self.may_claim = True
        self._claiming = asyncio.Lock()
        self.steps = asyncio.Event()  # cleared: the engine stands still
        self.steps.set()
        self._running: dict[str, _Running] = {}
        self._client = await LogClient.open(self.settings)
        self._registry = Registry(self._client)
        self._lease = self._client.lease(self.name, self.lease_s)
        await asyncio.to_thread(self._lease.renew)
        model = letters_model.card()
        await self._registry.register(self.name, model, {model.tokenizer_blob: letters_model.tokenizer_json()})
        self._ownership = Ownership(self._client, model=model.name, lease=self._lease)
        await self._ownership.ensure_groups()
        self._tasks = [asyncio.create_task(self._renew()), asyncio.create_task(self._work())]
        return self

    @property
    def running(self) -> list[str]:
        return list(self._running)

    @property
    def lengths(self) -> list[int]:
        """How many events each running request has: all of its log, once what is being appended is there."""
        return sorted(state.n for state in self._running.values())

    async def claim_no_more(self) -> None:
        """Until ``may_claim``; a claim under way has come to its end."""
        self.may_claim = False
        async with self._claiming:
            pass

    async def num_queued(self) -> int:
        """How many requests stand in the queue or run."""
        return (await self._registry.queue_stats(letters_model.NAME)).depth

    async def leave(self) -> None:
        """Stop in order, and be gone from the registry. Safe to repeat."""
        if not self._tasks:
            return
        await self._end_tasks()
        await self._registry.unregister(self.name)
        await asyncio.to_thread(self._lease.release)
        self._lease.close()
        await self._client.close()

    async def vanish(self) -> None:
        """Die without a word, but for the lease, which is gone at once."""
        await self._end_tasks()
        await asyncio.to_thread(self._lease.release)
        self._lease.close()
        await self._client.close()

    async def _end_tasks(self) -> None:
        tasks, self._tasks = self._tasks, []
        pending = set(tasks)
        while pending:  # Python 3.11 may lose a cancellation inside `asyncio.wait_for`
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=0.1)
        failed = [task.exception() for task in tasks if not task.cancelled()]
        assert not failed, failed

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            with contextlib.suppress(LogUnavailable):
                await asyncio.to_thread(self._lease.renew)

    async def _work(self) -> None:
        while True:
            async with self._claiming:
                if self.may_claim:
                    await self._claim()
            if self.takes_over:
                for owned in await self._ownership.takeover_scan(256):
                    self._begin(owned)
            if self._running and self.steps.is_set():
                await self._step()
            await asyncio.sleep(self.step_s)

    async def _claim(self) -> None:
        block_ms = 0 if self._running else 20
        with contextlib.suppress(LogUnavailable):
            for owned in await self._ownership.claim(256, block_ms=block_ms):
                self._begin(owned)

    def _begin(self, owned: Owned) -> None:
        self.seen.append(owned)
        prompt = letters_model.tokenizer().decode(owned.request.prompts[0])
        produced = sum(len(r.event.token_ids) for r in owned.events if isinstance(r.event, Tokens))
        self._running[owned.request.request_id] = _Running(
            owned, prompt, owned.last_n, produced // owned.request.num_choices, cancel=owned.cancel
        )

    async def _step(self) -> None:
        items = [self._advance(state) for state in self._running.values() if not self._stands_still(state)]
        for item, outcome in zip(items, await self._append(items), strict=True):
            state = self._running[item.request_id]
            state.cancel = state.cancel or outcome.cancel
            if outcome.status is AppendStatus.FENCED or item.is_final:
                del self._running[item.request_id]
            if item.is_final:
                self.ended[item.request_id] = state.cancel

    def _stands_still(self, state: _Running) -> bool:
        return self.pause_at is not None and state.produced >= self.pause_at and state.cancel is None

    async def _append(self, items: list[AppendItem]) -> list[AppendOutcome]:
        """Repeated until the log answers, as a worker does."""
        while True:
            try:
                return await self._ownership.append(items)
            except LogUnavailable:
                await asyncio.sleep(0.05)

    def _advance(self, state: _Running) -> AppendItem:
        request, epoch, now = state.owned.request, state.owned.epoch, time.time()
        events: list[OutputEvent] = []
        if not state.is_started:
            state.is_started = True
            queued_s = now - request.arrival_s
            events.append(
                Started(epoch=epoch, t=now, worker=self.name, resumed_from=state.owned.last_n, queue_s=queued_s)
            )
        if "FAIL-NOW" in state.text or ("FAIL-LATER" in state.text and state.produced >= 3):
            events.append(Failed(epoch=epoch, t=now, code="engine_error", message="the script says so"))
            return self._item(state, events, is_final=True)
        if state.cancel is None and self.steps.is_set():
            events += self._tokens(state, now)
        is_final = state.cancel is not None or state.produced >= state.budget
        if is_final:
            events += self._end(state, now)
        return self._item(state, events, is_final=is_final)

    def _tokens(self, state: _Running, now: float) -> list[OutputEvent]:
        count = min(self.tokens_a_step, state.budget - state.produced)
        letters = [letters_model.letter(state.produced + i) for i in range(count)]
        ids = tuple(letters_model.tokenizer().encode("".join(letters)))
        state.produced += count
        common: dict[str, Any] = {"epoch": state.owned.epoch, "t": now, "token_ids": ids, "text": "".join(letters)}
        return [Tokens(choice=choice, **common) for choice in range(state.owned.request.num_choices)] if count else []

    def _end(self, state: _Running, now: float) -> list[OutputEvent]:
        request, epoch = state.owned.request, state.owned.epoch
        reason = FinishReason.LENGTH if state.cancel is None else FinishReason.CANCELLED
        events: list[OutputEvent] = [
            ChoiceFinished(epoch=epoch, t=now, choice=choice, finish_reason=reason)
            for choice in range(request.num_choices)
        ]
        usage = Usage(
            prompt_tokens=sum(map(len, request.prompts)), completion_tokens=state.produced * request.num_choices
        )
        return [*events, Ended(epoch=epoch, t=now, usage=usage, cancelled=state.cancel)]

    def _item(self, state: _Running, events: list[OutputEvent], *, is_final: bool) -> AppendItem:
        first_n = state.n + 1
        state.n += len(events)
        return AppendItem(state.owned.request.request_id, state.owned.epoch, first_n, tuple(events), is_final)
