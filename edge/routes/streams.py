"""GET and DELETE /v1/streams/{request_id}: read a generation again from any position, by any edge; or end it."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from common.events import CancelReason
from edge.delivery import Delivery, count_of, flag_of, position_of
from edge.dependencies import services_of
from edge.generation import resume
from edge.request_context import context_of
from edge.request_status import known_to, status_document

router = APIRouter(tags=["streams"])


@router.get("/v1/streams/{request_id}")
async def read_stream(
    request: Request,
    request_id: str,
    after: str | None = None,
    after_chunks: str | None = None,
    stream: str = "true",
) -> Response:
    """The stream of a request (`X-Headrace-Request-Id`, or `X-Request-Id` where the client sent none), with positions.

    It begins after `Last-Event-ID`, or after the query parameter `after`, or, for a client that read a stream without
    positions, after as many `data:` lines as `after_chunks` says; else at the start. With `stream=false` it is the
    whole answer in one document, as soon as there is one. 400 when the place is behind the end of the stream, 410 when
    the request is unknown or past its retention, or still runs and has not come to the position.
    """
    if not flag_of(stream, "stream"):
        return await resume(request, request_id, Delivery(), whole=True)
    if after_chunks is not None:
        skip = count_of(after_chunks, "after_chunks")
        return await resume(request, request_id, Delivery(with_ids=True, skip_chunks=skip, named="after_chunks"))
    name, text = ("after", after) if after is not None else ("Last-Event-ID", request.headers.get("last-event-id"))
    events, chunks = position_of(text, name)
    return await resume(request, request_id, Delivery(with_ids=True, after=events, after_chunks=chunks, named=name))


@router.get("/v1/streams/{request_id}/status")
async def read_status(request: Request, request_id: str) -> Response:
    """Where a request stands: queued (with its position, 1 being the next, and an estimate), running or done."""
    await known_to(services_of(request), context_of(request.scope).tenant, request_id)
    return Response(await status_document(services_of(request), request_id), media_type="application/json")


@router.delete("/v1/streams/{request_id}", status_code=202)
async def cancel_stream(request: Request, request_id: str) -> Response:
    """Ends a request. Repeating it, or ending what has ended, is harmless."""
    await known_to(services_of(request), context_of(request.scope).tenant, request_id)
    await services_of(request).submitter.cancel(request_id, CancelReason.API)
    return Response(status_code=202)
