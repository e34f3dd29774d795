"""What supervisors and balancers ask: alive, ready, which version. None of it needs a key or touches the log."""

from __future__ import annotations

from importlib import metadata

import msgspec
from fastapi import APIRouter, Request, Response

from edge.dependencies import Services, services_of
from edge.lifecycle import Phase

router = APIRouter(tags=["operation"])


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health() -> Response:
    """200 while this process serves its event loop; nothing else is looked at."""
    return Response(status_code=200)


@router.get("/ready")
@router.head("/ready", include_in_schema=False)
async def ready(request: Request) -> Response:
    """200 when requests can be served now, else 503 with the reason: starting, draining, no log, no model."""
    reason = _not_ready(services_of(request))
    body = {"status": "ready"} if reason is None else {"status": "not ready", "reason": reason}
    status = 200 if reason is None else 503
    return Response(msgspec.json.encode(body), status, media_type="application/json")


@router.get("/ping")
@router.head("/ping", include_in_schema=False)
@router.post("/ping", include_in_schema=False)
async def ping() -> Response:
    """The same as /health, under the name that SageMaker asks for."""
    return Response(status_code=200)


@router.get("/version")
async def version() -> Response:
    """The version of this server."""
    return Response(msgspec.json.encode({"version": installed_version()}), media_type="application/json")


@router.get("/load")
async def load(request: Request) -> Response:
    """Generations in progress at this process."""
    body = {"server_load": services_of(request).occupancy.generations}
    return Response(msgspec.json.encode(body), media_type="application/json")


def installed_version() -> str:
    """The distribution's version; a source tree that is not installed has none."""
    try:
        return metadata.version("headrace")
    except metadata.PackageNotFoundError:
        return "unknown"


def _not_ready(services: Services) -> str | None:
    if services.lifecycle.phase is not Phase.READY:
        return services.lifecycle.phase.value
    if not services.catalog.is_reachable:
        return "the log cannot be reached"
    if not services.catalog.has_live_model:
        return "no model has a live worker"
    return None
