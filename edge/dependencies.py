"""What routes need, built once by `edge.app` and found through the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from starlette.requests import Request

    from common.telemetry.metrics import EdgeMetrics
    from common.telemetry.settings import FederationSettings
    from common.telemetry.tracing import Tracing
    from common.transport import Reading, Registry
    from edge.config import ApiSettings, LimitSettings, StreamSettings
    from edge.lifecycle import Lifecycle
    from edge.limits import Occupancy
    from edge.model_catalog import ModelCatalog
    from edge.no_worker import NoWorkerWatch
    from edge.relay import Relay
    from edge.submission import Submitter

T = TypeVar("T")
INLINE_BYTES = 16_384  # parsing less than this is faster than handing it to a thread
QUICK_BYTES = 4096  # rendering and tokenising what is not larger takes less than a millisecond


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one edge process."""

    edge_id: str
    registry: Registry
    reading: Reading
    catalog: ModelCatalog
    no_worker: NoWorkerWatch
    relay: Relay
    submitter: Submitter
    occupancy: Occupancy
    lifecycle: Lifecycle
    metrics: EdgeMetrics
    tracing: Tracing
    threads: ThreadPoolExecutor  # for what would hold the event loop: tokenising, templates, grammars
    api: ApiSettings
    limits: LimitSettings
    streams: StreamSettings
    federation: FederationSettings

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs ``work`` beside the event loop; as many at once as there are threads, the others wait in turn."""
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)


def services_of(request: Request) -> Services:
    """The parts of the edge that serves ``request``."""
    services: Services = request.app.state.services
    return services
