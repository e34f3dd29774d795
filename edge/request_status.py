"""Where a request stands, as clients are told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from common.errors import StreamExpired

if TYPE_CHECKING:
    from common.transport import Attached
    from edge.dependencies import Services


async def known_to(services: Services, tenant: str, request_id: str) -> Attached:
    """The request and its first event, without a trace of this look in the log. A request is known to its own tenant
    only: raises `StreamExpired` for any other, and `LogUnavailable`."""
    attached = await services.reading.attach(request_id, after=0, edge_id="", limit=1)
    if attached.spec.tenant != tenant:
        raise StreamExpired.of(request_id)
    return attached


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
