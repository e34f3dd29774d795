"""Joins the parts of one edge: reads settings, builds, connects, starts; and takes everything down again in order.

Middleware from the outside in: identity (id, span, log line), CORS, error boundary (keys, limits, errors to answers),
then the framework's routing.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from common.errors import LogUnavailable
from common.telemetry.logging import get_logger
from common.telemetry.metrics import EdgeMetrics
from common.telemetry.settings import FederationSettings
from common.telemetry.tracing import Tracing
from common.transport import FrameBus, GivingUp, LogClient, Reading, RedisSettings, Registry, Submission
from edge.auth import ApiKeys
from edge.boundary import ErrorBoundary, raise_as_ours
from edge.config import ApiSettings, CatalogSettings, HttpSettings, LimitSettings, StreamSettings
from edge.dependencies import Services
from edge.errors import Draining
from edge.lifecycle import Lifecycle
from edge.limits import Occupancy
from edge.model_catalog import ModelCatalog
from edge.no_worker import NoWorkerWatch
from edge.openapi import complete_openapi
from edge.relay import Relay
from edge.request_context import RequestIdentity
from edge.routes import chat, completions, docs, metrics, models, probes, streams, tokenization
from edge.submission import Submitter

RESTART_PAUSE_S: Final = 0.5
FLUSH_WITHIN_S: Final = 2.0
STOP_AGAIN_AFTER_S: Final = 0.2
HANDED_OVER_AT_ONCE: Final = 16
HANDOVER_PAUSE_S: Final = 0.02
_SHOWN_HEADERS: Final = (
    "retry-after",
    "traceresponse",
    "x-headrace-estimated-wait-s",
    "x-headrace-queue-position",
    "x-headrace-request-id",
    "x-request-id",
    "x-should-retry",
)
logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """All groups that an edge reads."""

    http: HttpSettings = field(default_factory=HttpSettings)
    api: ApiSettings = field(default_factory=ApiSettings)
    limits: LimitSettings = field(default_factory=LimitSettings)
    streams: StreamSettings = field(default_factory=StreamSettings)
    catalog: CatalogSettings = field(default_factory=CatalogSettings)
    redis: RedisSettings = field(default_factory=RedisSettings)
    federation: FederationSettings = field(default_factory=FederationSettings)


def create_app(settings: EdgeSettings, lifecycle: Lifecycle, tracing: Tracing) -> FastAPI:
    """The application. Its lifespan connects to the log and runs the background tasks.

    Raises `ConfigError` when the keys cannot be read.
    """
    edge_metrics = EdgeMetrics()
    occupancy = Occupancy(settings.limits)
    keys = ApiKeys.from_settings(settings.api)
    app: FastAPI = FastAPI(
        title="Headrace",
        version=probes.installed_version(),
        description="An OpenAI-compatible API over an event log.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        middleware=[
            Middleware(
                RequestIdentity,
                root_path=settings.http.root_path.rstrip("/"),
                keys=keys,
                partitions=lambda: app.state.partitions,
                metrics=edge_metrics,
                tracing=tracing,
            ),
            *_cors(settings.api),
            Middleware(ErrorBoundary, occupancy=occupancy, metrics=edge_metrics),
        ],
        exception_handlers={HTTPException: raise_as_ours},
        lifespan=lambda app: _lifespan(app, settings, lifecycle, tracing, edge_metrics, occupancy),
    )
    for part in (chat, completions, models, tokenization, streams, probes, metrics):
        app.include_router(part.router)
    if settings.api.docs:
        app.state.openapi = complete_openapi(app)
        app.include_router(docs.router, include_in_schema=False)
    return app


@asynccontextmanager
async def _lifespan(
    app: FastAPI,
    settings: EdgeSettings,
    lifecycle: Lifecycle,
    tracing: Tracing,
    edge_metrics: EdgeMetrics,
    occupancy: Occupancy,
) -> AsyncIterator[None]:
    log = await LogClient.open(settings.redis)
    edge_id = secrets.token_hex(6)
    threads = ThreadPoolExecutor(settings.limits.max_concurrent_renders, thread_name_prefix="render")
    registry, reading = Registry(log), Reading(log)
    catalog = ModelCatalog(registry, settings.catalog, edge_metrics, default_model=settings.api.served_model_default)
    services = Services(
        edge_id=edge_id,
        registry=registry,
        reading=reading,
        catalog=catalog,
        no_worker=NoWorkerWatch(catalog, GivingUp(log), edge_metrics),
        relay=Relay(
            reading, settings.streams, edge_metrics, edge_id=edge_id, refresh_s=settings.redis.reader_refresh_s
        ),
        submitter=Submitter(Submission(log), settings.limits, edge_metrics, edge_id=edge_id),
        occupancy=occupancy,
        lifecycle=lifecycle,
        metrics=edge_metrics,
        tracing=tracing,
        threads=threads,
        api=settings.api,
        limits=settings.limits,
        streams=settings.streams,
        federation=settings.federation,
    )
    app.state.services = services
    app.state.partitions = log.keys.partitions
    tasks = [
        asyncio.create_task(_forever("relay", lambda: services.relay.run(FrameBus(log, edge_id)))),
        asyncio.create_task(_forever("catalog", services.catalog.run)),
        asyncio.create_task(_forever("cancellations", services.submitter.run)),
        asyncio.create_task(_forever("log memory", services.submitter.watch_memory)),
        asyncio.create_task(_forever("no worker", services.no_worker.run)),
        asyncio.create_task(_hand_over_streams(services)),
        asyncio.create_task(_end_streams(services)),
    ]
    lifecycle.ready()
    logger.info("edge ready", edge_id=edge_id, partitions=log.keys.partitions)
    try:
        yield
    finally:
        if not await services.submitter.flush(FLUSH_WITHIN_S):
            logger.warning("cancellations were not sent before the stop; workers will miss the readers")
        await _stop(tasks)
        await services.relay.close()
        threads.shutdown(wait=False, cancel_futures=True)
        await log.close()


async def _forever(name: str, run: Callable[[], Awaitable[Any]]) -> None:
    """Runs a background task and starts it again should it fail: its state is not lost with it."""
    while True:
        started = time.monotonic()
        try:
            await run()
        except LogUnavailable as error:
            logger.warning("background task lost the log", task=name, error=error.message)
        except (Exception, BaseExceptionGroup):  # the outermost frame of the task
            logger.exception("background task failed", task=name, ran_s=round(time.monotonic() - started, 1))
        await asyncio.sleep(RESTART_PAUSE_S)


async def _hand_over_streams(services: Services) -> None:
    """Sends readers that can resume to other edges, a few at a time: there each costs a look at its whole stream."""
    if not services.streams.drain_handover:
        return
    await services.lifecycle.listens_no_more()
    why = Draining("This server is shutting down; the stream goes on at another one.")
    while True:
        services.relay.interrupt_resumable(HANDED_OVER_AT_ONCE, why)
        await asyncio.sleep(HANDOVER_PAUSE_S)


async def _end_streams(services: Services) -> None:
    """At the end of draining, streams that still run get an error; resumable ones go on without a reader."""
    await services.lifecycle.must_end()
    services.relay.interrupt_all(
        Draining("This server is shutting down and could not bring the answer to its end.", retry_after_s=1.0)
    )


async def _stop(tasks: list[asyncio.Task[None]]) -> None:
    """Cancels again what goes on: in Python 3.11 `asyncio.wait_for`, which the Redis client uses, loses a cancellation
    that arrives together with its result."""
    pending: set[asyncio.Task[None]] = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=STOP_AGAIN_AFTER_S)


def _cors(settings: ApiSettings) -> list[Middleware]:
    if not settings.cors_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST", "DELETE", "OPTIONS"],
            allow_headers=["*"],  # callers are known by their keys, never by cookies
            expose_headers=list(_SHOWN_HEADERS),
            max_age=600,
        )
    ]
