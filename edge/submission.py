"""Requests into the log, and cancellations of those that nobody wants any more.

A cancellation is handed over without waiting and sent by a task of this module: the task that served the reader is
itself being cancelled at that moment, and Redis may be away for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from common.errors import HeadraceError, LogUnavailable
from common.events import CancelReason
from common.telemetry.logging import get_logger
from common.transport import AdmissionLimits, Submitted

if TYPE_CHECKING:
    from common.events import EngineRequest
    from common.telemetry.metrics import EdgeMetrics
    from common.transport import Duplicate, Submission
    from edge.config import LimitSettings

MAX_PENDING_CANCELS: Final = 65_536
CANCEL_RETRY_FOR_S: Final = 60.0
PARALLEL_CANCELS: Final = 8
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Pending:
    request_id: str
    reason: CancelReason
    give_up_at: float


class Submitter:
    """What one edge process writes to the log. Start `run` as a task."""

    def __init__(self, submission: Submission, settings: LimitSettings, metrics: EdgeMetrics, *, edge_id: str) -> None:
        self._submission = submission
        self._limits = AdmissionLimits(
            max_requests=settings.max_queued_requests,
            max_tokens=settings.max_queued_tokens,
            max_tenant_requests=settings.max_tenant_queued_requests,
            max_tenant_tokens=settings.max_tenant_queued_tokens,
        )
        self._metrics = metrics
        self._edge_id = edge_id
        self._pending: deque[_Pending] = deque(maxlen=MAX_PENDING_CANCELS)
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()  # everything was sent
        self._idle.set()

    async def submit(self, request: EngineRequest, *, fingerprint: str, grace_s: float) -> Submitted | Duplicate:
        """Puts ``request`` into the log.

        When the caller is cancelled the submission goes on, since only then it is known whether there is something to
        cancel; with ``grace_s`` 0 it is cancelled as soon as it is in.

        Raises `Overloaded`, `IdempotencyConflict`, `LogUnavailable`.
        """
        started = time.perf_counter()
        task = asyncio.ensure_future(
            self._submission.submit(
                request,
                body_fingerprint=fingerprint,
                limits=self._limits,
                edge_id=self._edge_id,
                grace_s=grace_s,
            )
        )
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda done: self._abandon(done, request.request_id, grace_s))
            raise
        except LogUnavailable:
            self._metrics.log_errors.labels("submit").inc()
            raise
        finally:
            self._metrics.submit_seconds.observe(time.perf_counter() - started)

    def _abandon(self, done: asyncio.Future[Submitted | Duplicate], request_id: str, grace_s: float) -> None:
        if done.cancelled() or done.exception() is not None:
            return
        if grace_s == 0 and isinstance(done.result(), Submitted):
            self.cancel_soon(request_id, CancelReason.CLIENT_DISCONNECTED)

    def cancel_soon(self, request_id: str, reason: CancelReason) -> None:
        """Asks for the end of a request, without waiting. What cannot be sent for a minute is left to the worker,
        which misses the reader by itself."""
        self._metrics.cancels.labels(reason.value).inc()
        self._pending.append(_Pending(request_id, reason, time.monotonic() + CANCEL_RETRY_FOR_S))
        self._idle.clear()
        self._wake.set()

    async def cancel(self, request_id: str, reason: CancelReason) -> None:
        """Asks for the end of a request. Raises `LogUnavailable`."""
        self._metrics.cancels.labels(reason.value).inc()
        await self._submission.cancel(request_id, reason, self._edge_id)

    async def run(self) -> None:
        """Sends cancellations until cancelled itself."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                batch = [self._pending.popleft() for _ in range(min(PARALLEL_CANCELS, len(self._pending)))]
                failed = [item for item in await asyncio.gather(*map(self._send, batch)) if item is not None]
                self._pending.extend(failed)
                if failed:
                    await asyncio.sleep(0.5)
            self._idle.set()

    async def watch_memory(self) -> None:
        """Keeps knowing how full the log is, until cancelled."""
        await self._submission.watch_memory()

    async def flush(self, within_s: float) -> bool:
        """Waits until all cancellations are sent, for at most ``within_s``; whether they were."""
        try:
            await asyncio.wait_for(self._idle.wait(), within_s)
        except TimeoutError:
            return False
        return True

    async def _send(self, item: _Pending) -> _Pending | None:
        """None when there is nothing more to do about it."""
        try:
            await self._submission.cancel(item.request_id, item.reason, self._edge_id)
        except LogUnavailable:
            self._metrics.log_errors.labels("cancel").inc()
            return item if time.monotonic() < item.give_up_at else None
        except HeadraceError as error:
            _log.error("a cancellation was refused", cancelled_request=item.request_id, error=error.message)
        return None
