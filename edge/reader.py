"""One client reading one generation: its events in order, and what to do when the client or the answer ends."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, Final, Protocol

from common.errors import HeadraceError, StreamExpired
from common.events import TERMINAL, CancelReason, ChoiceFinished, Ended, Failed, Milestone, Recorded, Tokens
from edge.body import watching
from edge.boundary import ClientGone
from edge.figures import GenerationFigures
from edge.translate.failures import deadline_passed, failure_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request

    from common.events import EngineRequest
    from edge.dependencies import Services
    from edge.follower import Follower
    from edge.request_context import RequestContext

DEADLINE_SLACK_S: Final = 0.5  # the worker ends a request at its deadline; the edge, when no worker did


class Direct(Protocol):
    """Who takes events without waiting."""

    @property
    def is_ready(self) -> bool:
        """Whether `take` may be called now."""

    def take(self, events: list[Recorded]) -> None:
        """The next events, in order, none of them terminal."""


class GenerationReader:
    """Made when the request is in the log; `close` it whatever happens. Owned by the task that serves the client."""

    def __init__(
        self,
        services: Services,
        context: RequestContext,
        request: EngineRequest,
        follower: Follower,
        *,
        ends_with_reader: bool,
        endpoint: str,
    ) -> None:
        self._services = services
        self._request = request
        self._follower = follower
        self._ends_with_reader = ends_with_reader
        self._early: list[Recorded] = []  # taken while the answer was being held back
        self._cancel_reason = CancelReason.CLIENT_DISCONNECTED
        self._resubmit: Callable[[], Awaitable[object]] | None = None
        self._deadline = self._set_deadline()
        self._figures = GenerationFigures(services.metrics, services.tracing, context, request, endpoint)
        self._is_closed = False
        services.no_worker.enter(request)

    def resubmit_with(self, submit: Callable[[], Awaitable[object]]) -> None:
        """What to do when the log has lost the request before anything of its answer was shown (a failover)."""
        self._resubmit = submit

    async def started(self, request: Request, hold_s: float) -> None:
        """Waits until a worker has taken the request up, at most ``hold_s``, so that an early failure can still be an
        HTTP error. Raises that failure, or `ClientGone`."""
        try:
            with watching(request, self.client_gone):
                async with asyncio.timeout(hold_s):
                    while all(isinstance(recorded.event, Milestone) for recorded in self._early):
                        self._early += await self._take()
        except TimeoutError:
            return
        self._raise_early_failure()

    def client_gone(self) -> None:
        """Whoever waits for events gets `ClientGone`."""
        self._follower.interrupt(ClientGone())

    async def is_silent(self, seconds: float) -> bool:
        """Whether nothing comes within ``seconds``; what comes is kept for `next`. Raises as `next` does."""
        if self._early:
            return False
        events = asyncio.ensure_future(self._take())
        try:
            await asyncio.wait({events}, timeout=seconds)
            if events.done():
                self._early += events.result()
        finally:
            events.cancel()
        return not self._early

    async def next(self, direct: Direct) -> list[Recorded]:
        """The next events that ``direct`` does not take, at least one: while this waits, news go there as they come,
        without a task that wakes up, whenever it is ready, and but for the end of the answer.

        May be cancelled without losing any. Raises `StreamExpired`, `LogCorrupt`, `LogUnavailable`, or why the edge
        has to stop.
        """
        early, self._early = self._early, []
        if early:
            self._figures.note(early)
            return early
        self._follower.direct = functools.partial(self._hand_over, direct)
        try:
            events = await self._take()
        finally:
            self._follower.direct = None
        self._figures.note(events)
        return events

    def may_be_handed_over(self) -> bool:
        """From now on the client can go on at another edge; whether that is so, which it is not for a request that
        ends with its reader."""
        self._follower.may_be_handed_over = not self._ends_with_reader
        return self._follower.may_be_handed_over

    def goes_on_as(self, outcome: str) -> None:
        """The request goes on without this reader: its client was sent to another edge, or reads it later."""
        self._figures.goes_on_as = outcome

    def fail(self, error: HeadraceError) -> None:
        """The answer ends with an error; what still runs is nobody's any more."""
        self._figures.error = error
        self._cancel_reason = CancelReason.ORPHANED

    def close(self) -> None:
        """The client has its answer, or has gone. Cancels what is left of the request unless it may go on."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._services.no_worker.leave(self._request)
        self._services.relay.leave(self._follower)
        if self._figures.end is None and self._ends_with_reader:
            self._services.submitter.cancel_soon(self._request.request_id, self._cancel_reason)
        self._figures.conclude(self._follower.position)

    def _hand_over(self, direct: Direct) -> None:
        """Called when news have come."""
        if not direct.is_ready:
            self._follower.wake()
            return
        try:
            events = self._follower.take()
            if isinstance(events[-1].event, TERMINAL):
                self._follower.put_back(events)
            else:
                self._figures.note(events)
                direct.take(events)
        except Exception as error:  # noqa: BLE001 - it is raised again where the reader waits; others go on
            self._follower.interrupt(error)

    async def _take(self) -> list[Recorded]:
        while True:
            try:
                return await self._services.relay.batch(self._follower)
            except StreamExpired:
                if self._resubmit is None or self._follower.position > 0:
                    raise
                submit, self._resubmit = self._resubmit, None
                await submit()

    def _raise_early_failure(self) -> None:
        """Only a failure before any output: what came after output has to be told in the stream."""
        for recorded in self._early:
            match recorded.event:
                case Tokens() | ChoiceFinished():
                    return
                case Failed() as event:
                    self._figures.end = event
                    raise failure_of(event)
                case Ended(cancelled=CancelReason.DEADLINE) as event:
                    self._figures.end = event
                    raise deadline_passed()
                case _:
                    pass

    def _set_deadline(self) -> asyncio.TimerHandle | None:
        """Nobody but the edge ends a request that no worker takes."""
        if self._request.deadline_s is None:
            return None
        left_s = max(0.0, self._request.deadline_s - time.time()) + DEADLINE_SLACK_S
        submitter, request_id = self._services.submitter, self._request.request_id
        return asyncio.get_running_loop().call_later(left_s, submitter.cancel_soon, request_id, CancelReason.DEADLINE)
