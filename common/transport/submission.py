"""What edges write: requests and cancellations."""

from __future__ import annotations

from common.events import CancelReason, EngineRequest
from common.transport.client import LogClient
from common.transport.records import AdmissionLimits, CancelOutcome, Duplicate, Submitted


class Submission:
    """Admits requests to the log and cancels them."""

    def __init__(self, client: LogClient) -> None:
        self._client = client

    async def submit(
        self,
        request: EngineRequest,
        *,
        body_fingerprint: str,
        limits: AdmissionLimits,
        edge_id: str,
        grace_s: float,
    ) -> Submitted | Duplicate:
        """Put a request into its model's queue; it is durable when this returns.

        ``grace_s``: how long the request may run without any reader before the worker cancels it. 0: the edge
        cancels it itself when its client goes (the worker still does when the edge dies); < 0: never.

        Raises `Overloaded` (nothing was enqueued), `IdempotencyConflict` (same id, another fingerprint) and
        `LogUnavailable` (unknown whether it was enqueued: repeat with the same id).
        """
        raise NotImplementedError

    async def cancel(self, request_id: str, reason: CancelReason, by: str) -> CancelOutcome:
        """Ask for the end of a request; repeating it is harmless.

        Raises `LogUnavailable`, and `InvalidRequest` for a malformed id.
        """
        raise NotImplementedError
