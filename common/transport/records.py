"""What the transport hands out and takes: plain frozen data, no Redis in sight."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from common.events import CancelReason, EngineRequest, OutputEvent, Recorded
from common.model_card import ModelCard


class RequestPhase(StrEnum):
    """How far an accepted request is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds over the whole deployment and one model: what is queued and running together.

    A request counts its prompt tokens plus ``max_tokens`` for every choice. Work of lower classes does not count
    against a request of a higher one. All bounds (of one tenant: 0 is none) are exact where one server has all
    partitions; in a cluster, see `common.transport.elsewhere`.
    """

    max_requests: int
    max_tokens: int
    max_tenant_requests: int = 0
    max_tenant_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Submitted:
    """The request is in the log with the configured durability."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Duplicate:
    """The same request (id and body) was accepted before: attach to it."""

    request_id: str
    phase: RequestPhase


class CancelOutcome(StrEnum):
    """What a cancellation did."""

    ENDED = "ended"  # it was queued: its terminal event is in the log now
    ASKED = "asked"  # it is running: its owner will end it
    OVER = "over"  # it had ended already
    UNKNOWN = "unknown"  # no such request, or past retention


@dataclass(frozen=True, slots=True)
class Owned:
    """A request that this worker owns from now on, under ``epoch``.

    It replaces whatever the worker holds in memory of the same request: that belongs to an older epoch.
    ``events`` are 1..last_n of the log. ``cancel`` is set when somebody has asked for the end: the worker ends it.
    ``attempts`` counts how often it was taken from a dead worker, ``strikes`` how often in a row without progress.
    ``queued_s`` is the time since submission.
    """

    request: EngineRequest
    epoch: int
    last_n: int
    events: tuple[Recorded, ...]
    cancel: CancelReason | None
    attempts: int
    queued_s: float
    strikes: int = 0


@dataclass(frozen=True, slots=True)
class AppendItem:
    """Consecutive events ``first_n``, first_n + 1, ... of one request; the last one is terminal iff ``is_final``."""

    request_id: str
    epoch: int
    first_n: int
    events: tuple[OutputEvent, ...]
    is_final: bool = False


class AppendStatus(StrEnum):
    """What became of an `AppendItem`."""

    APPENDED = "appended"
    DUPLICATE = "duplicate"  # all of it was there already: a repetition of our own call
    FENCED = "fenced"  # not ours any more: drop the sequence silently
    GAP = "gap"  # the log is shorter than first_n - 1 (a failover lost its tail): append again from length + 1


@dataclass(frozen=True, slots=True)
class AppendOutcome:
    """``length`` is the number of events in the log now; ``cancel`` is set while somebody wants the request ended."""

    request_id: str
    status: AppendStatus
    length: int
    cancel: CancelReason | None = None


@dataclass(frozen=True, slots=True)
class Attached:
    """A view of one request, taken after the edge was registered for its frames.

    ``events`` follow the asked position without a gap; there may be more (up to ``last_n``): `Reading.read_range`.
    ``last_n`` below the asked position means that the log lost its tail in a failover.
    ``grace_s`` is what the submitter asked for (see `Submission.submit`).
    """

    request_id: str
    phase: RequestPhase
    spec: EngineRequest
    events: tuple[Recorded, ...]
    last_n: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class RequestStatus:
    """What the hash of a request says, for inspection."""

    request_id: str
    model: str
    phase: RequestPhase
    epoch: int
    owner: str
    attempts: int
    cancel: CancelReason | None
    cancelled_by: str
    edges: tuple[str, ...]
    submitted_s: float
    seen_s: float
    ended_s: float | None
    deadline_s: float | None
    last_n: int


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """Where a queued request stands now: ``ahead`` requests are claimed before it (those that come later with a higher
    class not foreseen); ``drain_rate`` is what the model finishes, requests per second over the last windows."""

    ahead: int
    drain_rate: float

    @property
    def estimated_wait_s(self) -> float | None:
        """None while nothing was measured."""
        return (self.ahead + 1) / self.drain_rate if self.drain_rate > 0 else None


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """A pushed hint: event ``n`` of a request (``payload`` decodes with `common.events.decode_output`)."""

    request_id: str
    n: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Resubscribed:
    """The subscription is new: anything may have been missed, so every followed request counts as having a gap."""


@dataclass(frozen=True, slots=True)
class RegisteredModel:
    """A model that some worker registered once, and the workers that serve it now."""

    card: ModelCard
    live_workers: tuple[str, ...]


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A registered worker; ``stats`` are its own figures (running sequences, free blocks, ...)."""

    worker: str
    model: str
    weights_fingerprint: str
    started_s: float
    seen_s: float
    stats: dict[str, float] = msgspec.field(default_factory=dict)
    is_live: bool = False


@dataclass(frozen=True, slots=True)
class QueueStats:
    """One model over all partitions. ``depth`` counts queued and running requests, ``running`` the claimed ones."""

    model: str
    depth: int
    running: int
    tokens: int  # admitted prompt and output tokens of all of them
    drain_rate: float  # finished requests per second, measured
    depth_by_class: dict[str, int] = field(default_factory=dict)
    dead_letters: int = 0

    @property
    def waiting(self) -> int:
        return max(self.depth - self.running, 0)
