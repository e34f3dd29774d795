"""A small world around the log: one model, edges by name, workers that can be made, killed and revived."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from common.events import (
    CancelReason,
    Ended,
    EngineRequest,
    OutputEvent,
    Recorded,
    SamplingParams,
    Started,
    Tokens,
    Usage,
)
from common.transport import (
    AdmissionLimits,
    AppendItem,
    AppendOutcome,
    AppendStatus,
    Duplicate,
    Lease,
    LogClient,
    Owned,
    Ownership,
    Reading,
    Registry,
    Submission,
    Submitted,
    new_request_id,
)

MODEL = "tiny"
PLENTY = AdmissionLimits(max_requests=10_000, max_tokens=10_000_000)


def tokens(epoch: int, *ids: int, choice: int = 0) -> Tokens:
    return Tokens(epoch=epoch, t=1.0, choice=choice, token_ids=ids, text="x" * len(ids))


def ended(epoch: int, *, cancelled: CancelReason | None = None) -> Ended:
    return Ended(epoch=epoch, t=2.0, usage=Usage(prompt_tokens=3), cancelled=cancelled)


def started(epoch: int, resumed_from: int = 0) -> Started:
    return Started(epoch=epoch, t=1.0, worker="w", resumed_from=resumed_from)


class Clock:
    """A monotonic clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@dataclass
class Worker:
    """One worker incarnation; ``lease_s`` long enough that only the test ends it."""

    name: str
    lease: Lease
    ownership: Ownership

    async def claim_one(self) -> Owned:
        (owned,) = await self.ownership.claim(1)
        return owned

    async def append(
        self, owned: Owned | tuple[str, int], first_n: int, *events: OutputEvent, is_final: bool = False
    ) -> AppendOutcome:
        request_id, epoch = (owned.request.request_id, owned.epoch) if isinstance(owned, Owned) else owned
        (outcome,) = await self.ownership.append([AppendItem(request_id, epoch, first_n, events, is_final)])
        return outcome

    async def finish(self, owned: Owned) -> None:
        n = owned.last_n + 1
        outcome = await self.append(owned, n, started(owned.epoch), ended(owned.epoch), is_final=True)
        assert outcome.status is AppendStatus.APPENDED

    def die(self) -> None:
        """What others see of a kill -9: the lease runs out. The process's memory stays, for zombies."""
        self.lease.release()


@dataclass
class World:
    client: LogClient
    submission: Submission = field(init=False)
    reading: Reading = field(init=False)
    registry: Registry = field(init=False)
    workers: list[Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.submission = Submission(self.client)
        self.reading = Reading(self.client)
        self.registry = Registry(self.client)

    async def worker(self, name: str, *, lease_s: float = 600.0, max_attempts: int = 3, look_s: float = 0.0) -> Worker:
        """A worker that holds its lease. ``look_s``: patience between the two looks at somebody's lease."""
        lease = self.client.lease(name, lease_s)
        lease.renew()
        lease.ttl_s = 4 * look_s
        ownership = Ownership(self.client, model=MODEL, lease=lease, max_attempts=max_attempts)
        lease.ttl_s = lease_s
        await ownership.ensure_groups()
        worker = Worker(name, lease, ownership)
        self.workers.append(worker)
        return worker

    def request(self, **changes: Any) -> EngineRequest:
        known: dict[str, Any] = {
            "request_id": new_request_id(self.client.keys.partitions),
            "model": MODEL,
            "prompts": ((1, 2, 3),),
            "sampling": SamplingParams(max_tokens=10, seed=7),
            "arrival_s": time.time(),
        }
        return EngineRequest(**{**known, **changes})

    async def submit(
        self,
        request: EngineRequest,
        *,
        fingerprint: str = "body",
        limits: AdmissionLimits = PLENTY,
        edge: str = "edge-a",
        grace_s: float = 0.0,
    ) -> Submitted | Duplicate:
        return await self.submission.submit(
            request, body_fingerprint=fingerprint, limits=limits, edge_id=edge, grace_s=grace_s
        )

    async def submit_new(self, **options: Any) -> EngineRequest:
        request = self.request()
        assert await self.submit(request, **options) == Submitted(request.request_id)
        return request

    async def log(self, request_id: str) -> list[Recorded]:
        return await self.reading.read_range(request_id, after=0)

    async def raw(self, *args: Any, key: str) -> Any:
        """A command behind the transport's back."""
        return await self.client.command(*args, key=key)

    async def assert_queues_clean(self) -> None:
        """No entry is left anywhere and nothing is pending."""
        stats = await self.registry.queue_stats(MODEL)
        assert (stats.depth, stats.running, stats.tokens) == (0, 0, 0)

    def close(self) -> None:
        for worker in self.workers:
            worker.lease.close()
