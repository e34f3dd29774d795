"""Models, blobs, workers and queue figures."""

from __future__ import annotations

from collections.abc import Mapping

from common.model_card import ModelCard
from common.transport.client import LogClient
from common.transport.records import QueueStats, RegisteredModel, WorkerRecord


class Registry:
    """What workers publish about themselves and edges read."""

    def __init__(self, client: LogClient) -> None:
        self._client = client

    async def register(self, worker: str, card: ModelCard, blobs: Mapping[str, bytes]) -> None:
        """Publish a worker and its model; ``blobs`` by SHA-256. Idempotent.

        Raises `ConfigError` when live workers serve the same name with other weights.
        """

    async def report(self, worker: str, stats: Mapping[str, float]) -> None:
        """Refresh the worker's figures (and its record, should the server have lost it)."""

    async def unregister(self, worker: str) -> None:
        """Remove a worker that stops in order."""

    async def models(self) -> list[RegisteredModel]:
        """Every model ever registered, with the workers whose lease holds now."""
        raise NotImplementedError

    async def blob(self, sha256: str) -> bytes:
        """Content by its hash. Raises `StreamExpired` when there is none, `LogCorrupt` when it does not match."""
        raise NotImplementedError

    async def workers(self) -> list[WorkerRecord]:
        """Every registered worker, live or not."""
        raise NotImplementedError

    async def drain(self, worker: str, *, handover: bool) -> None:
        """Tell a worker to take nothing new; with ``handover`` to release what it runs."""

    async def queue_stats(self, model: str) -> QueueStats:
        """Depth, admitted tokens and drain rate of one model."""
        raise NotImplementedError
