"""From a request id to its trace id, so that a trace is found by the request id alone.

The rule, in order:

1. a client that sent a valid ``traceparent`` keeps its trace id;
2. a request id that ends with a UUID (with or without hyphens, behind any prefix such as ``req_``): its 32 hex digits;
3. any other request id: the first 16 bytes of its SHA-256.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Final

_UUID: Final = re.compile(
    r"(?<![0-9a-f])(?:[0-9a-f]{32}|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})$", re.IGNORECASE
)
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-.*)?")


def trace_id_of(request_id: str) -> int:
    """Rules 2 and 3: a 128-bit trace id, never 0."""
    match = _UUID.search(request_id)
    if match:
        found = int(match.group().replace("-", ""), 16)
        if found:
            return found
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:16]) or 1


def traceparent_trace_id(carrier: Mapping[str, str]) -> str | None:
    """Rule 1: the trace id in a W3C carrier, or None when there is none or it is malformed."""
    match = _TRACEPARENT.fullmatch(carrier.get("traceparent", ""))
    if match is None or not match.group(1).strip("0") or not match.group(2).strip("0"):
        return None
    return match.group(1)


def trace_id_hex(request_id: str, carrier: Mapping[str, str] | None = None) -> str:
    """The trace id of a request as 32 hex digits, by all three rules."""
    return traceparent_trace_id(carrier or {}) or f"{trace_id_of(request_id):032x}"
