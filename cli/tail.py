"""``headrace tail``: what happens in the whole deployment, event by event, as it is logged. Stop it with Ctrl-C.

A ``headrace serve`` must be running here, or ``--redis-url`` given.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from pydantic import Field

from cli.groups import LOG_READERS
from cli.local_log import opened_log
from cli.timeline import describe, is_handover
from common.config import Loaded, Settings, load
from common.errors import StreamExpired
from common.events import EngineRequest, Tokens
from common.transport import Reading, RequestPhase


class TailSettings(Settings):
    """What is shown, and how often the log is looked at."""

    tail_tokens: bool = Field(True, description="Show token events too.")
    tail_seconds: float = Field(0.0, ge=0, description="Stop after so long; 0: when interrupted.")
    tail_poll_s: float = Field(0.25, gt=0, le=60, description="Time between two looks at the log.")


def main(argv: Sequence[str], prog: str) -> int:
    loaded = load([TailSettings, *LOG_READERS], argv, prog=prog, description=__doc__ or "")
    asyncio.run(_tail(loaded[TailSettings], loaded))
    return 0


async def _tail(settings: TailSettings, loaded: Loaded) -> None:
    async with opened_log(loaded, starts=False) as client:
        await _Tail(Reading(client), settings).run()


class _Tail:
    """Follows every request that is or becomes active."""

    def __init__(self, reading: Reading, settings: TailSettings) -> None:
        self._reading = reading
        self._settings = settings
        self._specs: dict[str, EngineRequest] = {}
        self._positions: dict[str, int] = {}
        self._over: set[str] = set()
        self._handed_over: set[str] = set()  # by their last event

    async def run(self) -> None:
        self._over = {
            request_id
            for request_id in await self._reading.request_ids()
            if (await self._phase(request_id)) in (RequestPhase.DONE, None)
        }
        until = time.monotonic() + self._settings.tail_seconds
        while not self._settings.tail_seconds or time.monotonic() < until:
            known = await self._reading.request_ids()
            self._over &= set(known)
            for request_id in sorted(set(known) - self._over):
                await self._show_new(request_id)
            await asyncio.sleep(self._settings.tail_poll_s)

    async def _phase(self, request_id: str) -> RequestPhase | None:
        try:
            return (await self._reading.status(request_id)).phase
        except StreamExpired:
            return None

    async def _show_new(self, request_id: str) -> None:
        after = self._positions.get(request_id)
        try:
            attached = await self._reading.attach(request_id, after=after or 0, edge_id="")
        except StreamExpired:
            self._over.add(request_id)
            self._handed_over.discard(request_id)
            return
        if after is None:
            self._specs[request_id] = attached.spec
            prompts = sum(len(prompt) for prompt in attached.spec.prompts)
            self._print(attached.spec.arrival_s, request_id, f"queued for {attached.spec.model}, {prompts} tokens")
        for item in attached.events:
            if self._settings.tail_tokens or not isinstance(item.event, Tokens):
                is_handed_over = request_id in self._handed_over
                text = describe(self._specs[request_id], item.event, is_handed_over=is_handed_over)
                self._print(item.event.t, request_id, f"{item.n} {text}")
            self._handed_over.discard(request_id)
            if is_handover(item.event):
                self._handed_over.add(request_id)
        self._positions[request_id] = (after or 0) + len(attached.events)
        if attached.phase is RequestPhase.DONE and self._positions[request_id] >= attached.last_n:
            self._over.add(request_id)
            del self._positions[request_id], self._specs[request_id]

    def _print(self, at_s: float, request_id: str, text: str) -> None:
        clock = time.strftime("%H:%M:%S", time.localtime(at_s))
        print(f"{clock}.{int(at_s * 1000) % 1000:03d}  {request_id}  {text}", flush=True)
