"""Every key and channel name, in one place.

A request id is ``<p>-<uuid>``: p, a decimal number, is the request's partition. All keys of a request carry the hash
tag ``{p}``, so one script may touch many requests of a partition and stays legal in a cluster. What belongs to no
partition (models, blobs, workers, the layout) carries the tag ``{meta}``.
"""

from __future__ import annotations

import re
import secrets
import time
import uuid
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple

from common.errors import InvalidRequest

GROUP: Final = "engine"
WAITING: Final = b"0-0"  # as the queue entry of a request that waits in a backlog
_REQUEST_ID: Final = re.compile(r"(0|[1-9][0-9]{0,5})-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_IDEMPOTENCY_NAMESPACE: Final = uuid.UUID("5d8f1c1e-6f1b-5f60-9a52-6e0b6f5f2c11")


class QueueClass(IntEnum):
    """The streams of one model in the order in which they are read; a request's hash names its class by number.

    RESUME holds what a stopping worker handed over: somebody is already reading the answer. UNDERSERVED is where former
    versions put some normal requests; nothing comes there any more, and what is there is read.
    """

    RESUME = 1
    HIGH = 2
    UNDERSERVED = 3
    NORMAL = 4
    LOW = 5

    @classmethod
    def of_priority(cls, priority: int) -> QueueClass:
        """The class of `EngineRequest.priority` (lower runs earlier): negative, zero, positive."""
        if priority < 0:
            return cls.HIGH
        return cls.NORMAL if priority == 0 else cls.LOW


BACKLOGGED: Final = (QueueClass.HIGH, QueueClass.NORMAL, QueueClass.LOW)
"""Classes that requests are submitted to: behind their streams, the rest waits in a fair order."""


def new_request_id(partitions: int) -> str:
    """A fresh request id in a random partition; ids of one partition sort by time (UUID version 7)."""
    value = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"{secrets.randbelow(partitions)}-{uuid.UUID(int=value)}"


def idempotent_request_id(tenant: str, key: str, partitions: int) -> str:
    """The one request id of an Idempotency-Key: the same on every edge, different for every tenant."""
    value = uuid.uuid5(_IDEMPOTENCY_NAMESPACE, f"{len(tenant)}:{tenant}:{key}")
    return f"{value.int % partitions}-{value}"


class _Names(NamedTuple):
    """Of one request."""

    partition: int
    request: str
    output: str


@lru_cache(maxsize=8192)  # a worker asks for them at each token
def _names_of(prefix: str, partitions: int, request_id: str) -> _Names:
    match = _REQUEST_ID.fullmatch(request_id)
    if match is None or int(match[1]) >= partitions:
        raise InvalidRequest(f"not a request id of this deployment: {request_id[:80]!r}", param="request_id")
    tagged = f"{prefix}{{{match[1]}}}"
    return _Names(int(match[1]), f"{tagged}:req:{request_id}", f"{tagged}:out:{request_id}")


@dataclass(frozen=True, slots=True)
class Keys:
    """Names for one deployment: ``prefix`` (with its separator, such as ``headrace:``) and the partition count."""

    prefix: str
    partitions: int

    def partition(self, request_id: str) -> int:
        """The partition of a request id. Raises `InvalidRequest` when it is not an id of this deployment."""
        return _names_of(self.prefix, self.partitions, request_id).partition

    def _of(self, partition: int, rest: str) -> str:
        return f"{self.prefix}{{{partition}}}:{rest}"

    def request(self, request_id: str) -> str:
        """Hash: state of one request."""
        return _names_of(self.prefix, self.partitions, request_id).request

    def all_requests(self, partition: int) -> str:
        """Pattern of the hashes of a partition's requests."""
        return self._of(partition, "req:*")

    def output(self, request_id: str) -> str:
        """Stream: the events of one request, ids ``<n>-0``."""
        return _names_of(self.prefix, self.partitions, request_id).output

    def queue(self, partition: int, model: str, queue_class: QueueClass) -> str:
        """Stream: admitted requests of one model and class."""
        return self._of(partition, f"q:{model}:{queue_class.name.lower()}")

    def queues(self, partition: int, model: str) -> list[str]:
        """All queues of one model in one partition, in the order of `QueueClass`."""
        return [self.queue(partition, model, queue_class) for queue_class in QueueClass]

    def backlog(self, partition: int, model: str, queue_class: QueueClass) -> str:
        """Sorted set: what waits behind a queue, by start tag in virtual time."""
        return self._of(partition, f"backlog:{model}:{queue_class.name.lower()}")

    def turns(self, partition: int, model: str, queue_class: QueueClass) -> str:
        """Sorted set: the virtual time, and the tenants that are ahead of it."""
        return self._of(partition, f"turns:{model}:{queue_class.name.lower()}")

    def backlogs(self, partition: int, model: str) -> list[str]:
        """Backlog and turns of each class of `BACKLOGGED`."""
        names = (self.backlog, self.turns)
        return [name(partition, model, queue_class) for queue_class in BACKLOGGED for name in names]

    def load(self, partition: int, model: str) -> str:
        """Hash: admitted tokens by class, drain rate."""
        return self._of(partition, f"load:{model}")

    def dead_letters(self, partition: int, model: str) -> str:
        """Stream: requests given up, with the reason."""
        return self._of(partition, f"dlq:{model}")

    def lease(self, partition: int, worker: str) -> str:
        """String with a time to live: the worker's lease; its value is the incarnation token."""
        return self._of(partition, f"wk:{worker}")

    def inbox(self, partition: int, worker: str) -> str:
        """Stream: cancellations and drains for one worker."""
        return self._of(partition, f"in:{worker}")

    def bus(self, partition: int, edge_id: str) -> str:
        """Pub/sub channel of one edge."""
        return self._of(partition, f"bus:{edge_id}")

    @property
    def layout(self) -> str:
        """String: the partition count this deployment was started with."""
        return f"{self.prefix}{{meta}}:partitions"

    @property
    def models(self) -> str:
        """Hash: model name to card."""
        return f"{self.prefix}{{meta}}:models"

    @property
    def workers(self) -> str:
        """Hash: worker to its record."""
        return f"{self.prefix}{{meta}}:workers"

    def blob(self, sha256: str) -> str:
        """String: content by its SHA-256."""
        return f"{self.prefix}{{meta}}:blob:{sha256}"
