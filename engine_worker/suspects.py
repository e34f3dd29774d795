"""Requests that may have killed their workers run one after another, so that the guilty one is found alone.

A worker that dies leaves all its requests under suspicion, and those that are computed together with the culprit would
die with it every time. So a request that has struck twice is held until no other suspect is being tried: one is tried
until it has drawn a token here (then it is innocent for now) or has ended. Who waits says so in its log, and is not
blamed when its worker dies meanwhile; who is let in says that, too, before it begins.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from engine_worker.handoff import Add, Commands
from engine_worker.live_request import LiveRequest
from engine_worker.output_stage import OutputStage
from engine_worker.resume import Resumed

SUSPECT_STRIKES: Final = 2
_TICK_S: Final = 0.02


class Suspects:
    """The suspects of one worker. Owned by the I/O loop."""

    def __init__(self, output: OutputStage, commands: Commands) -> None:
        self._output = output
        self._commands = commands
        self._held: deque[Resumed] = deque()
        self._tried: LiveRequest | None = None
        self._wake = asyncio.Event()

    def admit(self, resumed: Resumed) -> None:
        """Begin with a suspect, which the output stage has adopted, as soon as it is its turn."""
        if self._tried is None and not self._held:
            self._begin(resumed)
            return
        self._output.milestone(resumed.live, "held_back")
        self._held.append(resumed)
        self._wake.set()

    async def let_in_forever(self) -> None:
        """Begin with those that wait, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._held or self._tried is not None:
                await self._let_in_next()
                await asyncio.sleep(_TICK_S)

    async def _let_in_next(self) -> None:
        if self._tried is not None and self._is_wanted(self._tried) and self._tried.timeline.last_token_s is None:
            return
        self._tried = None
        while self._held:
            resumed = self._held.popleft()
            if not self._is_wanted(resumed.live):
                continue
            self._tried = resumed.live
            self._output.milestone(resumed.live, "let_in")
            while not resumed.live.is_logged and self._is_wanted(resumed.live):  # noqa: ASYNC110 - told by nobody
                await asyncio.sleep(_TICK_S)
            if self._is_wanted(resumed.live):
                self._begin(resumed)
                return
            self._tried = None

    def _begin(self, resumed: Resumed) -> None:
        self._tried = resumed.live
        self._wake.set()
        self._commands.put(Add(resumed.live.request_id, resumed.sequences))

    def _is_wanted(self, live: LiveRequest) -> bool:
        return self._output.live.get(live.request_id) is live and not live.is_over
