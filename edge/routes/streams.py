"""GET and DELETE /v1/streams/{request_id}: read a generation again from any position, by any edge; or end it."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from common.errors import StreamExpired
from common.events import CancelReason
from edge.delivery import Delivery, position_of
from edge.dependencies import services_of
from edge.generation import resume
from edge.request_context import context_of

router = APIRouter(tags=["streams"])


@router.get("/v1/streams/{request_id}")
async def read_stream(request: Request, request_id: str, after: str | None = None) -> Response:
    """The stream of a request (`X-Headrace-Request-Id`, or `X-Request-Id` where the client sent none), with positions.

    It begins after `Last-Event-ID`, or after the query parameter `after`, or at the start. 410 when the request is
    unknown or past its retention.
    """
    name, text = ("after", after) if after is not None else ("Last-Event-ID", request.headers.get("last-event-id"))
    events, chunks = position_of(text, name)
    return await resume(request, request_id, Delivery(with_ids=True, after=events, after_chunks=chunks))


@router.delete("/v1/streams/{request_id}", status_code=202)
async def cancel_stream(request: Request, request_id: str) -> Response:
    """Ends a request. Repeating it, or ending what has ended, is harmless."""
    services = services_of(request)
    attached = await services.reading.attach(request_id, after=0, edge_id="", limit=1)
    if attached.spec.tenant != context_of(request.scope).tenant:
        raise StreamExpired("There is no such stream, or it is past its retention.")
    await services.submitter.cancel(request_id, CancelReason.API)
    return Response(status_code=202)
