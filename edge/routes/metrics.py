"""GET and HEAD /metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from common.errors import LogUnavailable
from common.telemetry.federation import federated
from common.telemetry.metrics import CONTENT_TYPE, exposition
from edge.dependencies import Services, services_of

router = APIRouter(tags=["operation"])
QUEUE_FIGURES_WITHIN_S = 1.0


@router.get("/metrics")
@router.head("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """This edge's metrics, and those of the workers it federates, in Prometheus' text format."""
    if request.method == "HEAD":  # benchmark tools ask this first, to see whether there are metrics
        return Response(media_type=CONTENT_TYPE)
    services = services_of(request)
    await _refresh_queue_figures(services)
    page = await federated(exposition(services.metrics.registry), services.federation.federate_metrics)
    return Response(page, media_type=CONTENT_TYPE)


async def _refresh_queue_figures(services: Services) -> None:
    """Queue depths are read when somebody looks. Without the log the page still has everything else."""
    names = {model.card.name for model in services.catalog.models.values()}
    try:
        async with asyncio.timeout(QUEUE_FIGURES_WITHIN_S):
            for stats in await asyncio.gather(*map(services.registry.queue_stats, names)):
                services.metrics.queue_depth.labels(stats.model).set(stats.depth)
                services.metrics.queue_tokens.labels(stats.model).set(stats.tokens)
    except (LogUnavailable, TimeoutError):
        services.metrics.log_errors.labels("queue_stats").inc()
