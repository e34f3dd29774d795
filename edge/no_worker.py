"""Requests whose model has lost its last worker: they wait for the next one, for a while.

A worker that is replaced, or restarted by its supervisor, is away for seconds. Until ``no_worker_grace_s`` has passed
the edge accepts and queues; then it refuses new requests and ends those that were never begun. What a worker has begun
waits on for another one, up to its deadline: its output is worth something.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from common.errors import DeadlineExceeded, HeadraceError, LogUnavailable, ModelUnavailable
from common.telemetry.logging import get_logger

if TYPE_CHECKING:
    from common.events import EngineRequest
    from common.telemetry.metrics import EdgeMetrics
    from common.transport import GivingUp
    from edge.model_catalog import ModelCatalog

_AFTER_DEADLINE_S: Final = 2.0  # a worker, where there is one, has ended it by then
_AT_ONCE: Final = 8
_log = get_logger(__name__)


class NoWorkerWatch:
    """The requests that are read at this edge. Start `run` as a task."""

    def __init__(self, catalog: ModelCatalog, giving_up: GivingUp, metrics: EdgeMetrics) -> None:
        self._catalog = catalog
        self._giving_up = giving_up
        self._metrics = metrics
        self._requests: dict[str, EngineRequest] = {}
        self._readers: Counter[str] = Counter()

    def enter(self, request: EngineRequest) -> None:
        """Somebody reads it here."""
        self._requests[request.request_id] = request
        self._readers[request.request_id] += 1

    def leave(self, request: EngineRequest) -> None:
        """One of its readers is gone."""
        self._readers[request.request_id] -= 1
        if self._readers[request.request_id] <= 0:
            del self._readers[request.request_id], self._requests[request.request_id]

    async def run(self) -> None:
        """Ends what waits for too long, until cancelled. Raises `LogUnavailable`."""
        while True:
            await self._catalog.refreshed()
            late = [found for request in self._requests.values() if (found := self._verdict(request)) is not None]
            for start in range(0, len(late), _AT_ONCE):
                await asyncio.gather(*(self._end(*one) for one in late[start : start + _AT_ONCE]))

    def _verdict(self, request: EngineRequest) -> tuple[EngineRequest, HeadraceError] | None:
        if self._catalog.absent_s(request.model) == 0:
            return None
        if request.deadline_s is not None and time.time() > request.deadline_s + _AFTER_DEADLINE_S:
            return request, DeadlineExceeded("The request's deadline passed while no worker of its model was there.")
        if self._catalog.has_patience(request.model):
            return None
        return request, ModelUnavailable(f"No worker of the model `{request.model}` came to run the request.")

    async def _end(self, request: EngineRequest, error: HeadraceError) -> None:
        begun_too = isinstance(error, DeadlineExceeded)
        try:
            if await self._giving_up.give_up(request.request_id, error, begun_too=begun_too):
                self._metrics.given_up.labels(error.code).inc()
                _log.warning("gave a request up: no worker", request_id=request.request_id, code=error.code)
        except LogUnavailable:
            self._metrics.log_errors.labels("give_up").inc()
