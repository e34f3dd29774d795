"""What the other partitions of a model hold, for limits that count over all of them.

A script reaches one hash slot. On one server all partitions are within its reach, and it adds up itself: limits are
exact. In a cluster the edge adds up and tells the script. Far below the limits an answer of the last second will do,
for a few submissions; near them, and for limits of one tenant, each submission asks anew, so that too much is admitted
only by submissions that cross.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from common.events import EngineRequest
from common.transport.client import LogClient
from common.transport.keys import QueueClass
from common.transport.records import AdmissionLimits

_MOST_SUMMED: Final = 256  # partitions that a script looks at
_GOOD_FOR_S: Final = 1.0
_NEAR: Final = 0.5  # of a limit
_GOOD_FOR: Final = 0.05  # of a limit: so much may be submitted on one answer
_ADMITTING: Final = (QueueClass.HIGH, QueueClass.NORMAL, QueueClass.LOW)


class Held(NamedTuple):
    """Admitted and unfinished in partitions that the script does not reach; ``rate``: finished requests a second."""

    requests: int = 0
    tokens: int = 0
    tenant_requests: int = 0
    tenant_tokens: int = 0
    rate: float = 0.0


@dataclass(slots=True)
class _Answer:
    """What all partitions held at ``asked_at`` (monotonic), and what was submitted on it since."""

    held: tuple[Held, ...]
    asked_at: float
    requests: int = 0
    tokens: int = 0

    def will_do(self, cost: int, limits: AdmissionLimits) -> bool:
        self.requests += 1
        self.tokens += cost
        return (
            time.monotonic() - self.asked_at < _GOOD_FOR_S
            and self.requests < _GOOD_FOR * limits.max_requests
            and self.tokens < _GOOD_FOR * limits.max_tokens
            and sum(one.requests for one in self.held) < _NEAR * limits.max_requests
            and sum(one.tokens for one in self.held) < _NEAR * limits.max_tokens
        )


class Elsewhere:
    """Asked by every submission of one process."""

    def __init__(self, client: LogClient) -> None:
        self._client = client
        self._known: dict[tuple[str, QueueClass], _Answer] = {}

    async def of(
        self, partition: int, request: EngineRequest, cost: int, limits: AdmissionLimits
    ) -> tuple[Sequence[str], Held]:
        """Load hashes that the script shall add up, and what is held beyond them in the class of ``request`` and above.

        ``cost``: the tokens that it counts for.
        """
        keys = self._client.keys
        others = [other for other in range(keys.partitions) if other != partition]
        if not others or (not self._client.connections.is_cluster and keys.partitions <= _MOST_SUMMED):
            return [keys.load(other, request.model) for other in others], Held()
        held = await self._all(request, cost, limits)
        return (), Held(*map(sum, zip(*(held[other] for other in others), strict=True)))

    async def _all(self, request: EngineRequest, cost: int, limits: AdmissionLimits) -> tuple[Held, ...]:
        """One a partition."""
        key = (request.model, QueueClass.of_priority(request.priority))
        known = self._known.get(key)
        is_of_tenant = bool(limits.max_tenant_requests or limits.max_tenant_tokens)
        if known is not None and not is_of_tenant and known.will_do(cost, limits):
            return known.held
        reads = (self._read(p, *key, request.tenant) for p in range(self._client.keys.partitions))
        found = tuple(await asyncio.gather(*reads))
        self._known[key] = _Answer(found, time.monotonic(), requests=1, tokens=cost)
        return found

    async def _read(self, partition: int, model: str, queue_class: QueueClass, tenant: str) -> Held:
        key = self._client.keys.load(partition, model)
        counted = [int(c) for c in _ADMITTING if c <= queue_class]
        fields = [f"requests:{c}" for c in counted] + [f"tokens:{c}" for c in counted]
        values = await self._client.command("HMGET", key, *fields, f"tn:{tenant}", f"tt:{tenant}", "rate", key=key)
        numbers = [int(value or 0) for value in values[:-1]]
        return Held(
            sum(numbers[: len(counted)]),
            sum(numbers[len(counted) : -2]),
            tenant_requests=numbers[-2],
            tenant_tokens=numbers[-1],
            rate=float(values[-1] or 0),
        )
