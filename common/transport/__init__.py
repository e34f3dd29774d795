"""The log: the only package that sees Redis. It speaks requests, events and positions, and raises `common.errors`."""

from common.transport.client import LogClient, RedisSettings
from common.transport.embedded import EmbeddedServer, EmbeddedSettings
from common.transport.giving_up import GivingUp
from common.transport.keys import Keys, QueueClass, idempotent_request_id, new_request_id
from common.transport.leases import Lease
from common.transport.ownership import Ownership
from common.transport.reading import FrameBus, Reading
from common.transport.records import (
    AdmissionLimits,
    AppendItem,
    AppendOutcome,
    AppendStatus,
    Attached,
    CancelOutcome,
    Duplicate,
    Frame,
    Owned,
    QueuePlace,
    QueueStats,
    RegisteredModel,
    RequestPhase,
    RequestStatus,
    Resubscribed,
    Submitted,
    WorkerRecord,
)
from common.transport.registry import Registry
from common.transport.submission import Submission

__all__ = [
    "AdmissionLimits",
    "AppendItem",
    "AppendOutcome",
    "AppendStatus",
    "Attached",
    "CancelOutcome",
    "Duplicate",
    "EmbeddedServer",
    "EmbeddedSettings",
    "Frame",
    "FrameBus",
    "GivingUp",
    "Keys",
    "Lease",
    "LogClient",
    "Owned",
    "Ownership",
    "QueueClass",
    "QueuePlace",
    "QueueStats",
    "Reading",
    "RedisSettings",
    "RegisteredModel",
    "Registry",
    "RequestPhase",
    "RequestStatus",
    "Resubscribed",
    "Submission",
    "Submitted",
    "WorkerRecord",
    "idempotent_request_id",
    "new_request_id",
]
