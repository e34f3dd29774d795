"""Where a request stands, as clients are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from edge.dependencies import Services


async def status_document(services: Services, request_id: str) -> bytes:
    """JSON. Raises `StreamExpired`, `LogUnavailable`."""
    status, place = await services.reading.status(request_id), await services.reading.queue_place(request_id)
    document = {
        "id": request_id,
        "model": status.model,
        "status": status.phase.value,
        "created": status.submitted_s,
        "deadline": status.deadline_s,
        "events": status.last_n,
        "queue_position": None if place is None else place.ahead + 1,
        "estimated_wait_s": None if place is None else place.estimated_wait_s,
        "cancelled": status.cancel,
    }
    return msgspec.json.encode(document)
