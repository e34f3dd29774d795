"""What the redis library's failures mean: which calls are tried again, and our errors for the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, TypeVar

import redis
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    MasterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    SlotNotCoveredError,
    TryAgainError,
)

from common.errors import HeadraceError, LogCorrupt, LogUnavailable

_T = TypeVar("_T")

TRANSIENT: Final = (
    redis.ConnectionError,
    redis.TimeoutError,
    ReadOnlyError,
    ClusterDownError,
    MasterDownError,
    SlotNotCoveredError,
    TryAgainError,
    RedisClusterException,
    OSError,
)
"""Failures after which a repeatable call is tried again on a fresh connection."""

# Answers of a healthy connection that say "not now".
_REFUSALS: Final = ("MISCONF", "NOREPLICAS", "BUSY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "UNBLOCKED")


def translated(error: Exception) -> HeadraceError:
    """Our error for one of the library's."""
    text = str(error)
    if isinstance(error, AuthenticationError):
        return LogUnavailable(f"the server refuses the credentials: {text}")
    if isinstance(error, TRANSIENT):
        return LogUnavailable(f"the log cannot be reached: {type(error).__name__}: {text}")
    if isinstance(error, OutOfMemoryError) or text.startswith(_REFUSALS):
        return LogUnavailable(f"the log refuses: {text}")
    return LogCorrupt(f"the log does not understand: {text}")


def is_missing_group(error: ResponseError) -> bool:
    """Whether the consumer group has vanished (the stream was deleted or the server lost its data)."""
    return "NOGROUP" in str(error)


async def heeding_cancellation(call: Awaitable[_T]) -> _T:
    """The call's result, or `CancelledError` when the task was cancelled meanwhile.

    The library sends through `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that meets the end
    of what it waits for: the task would live on, and whoever waits for its end would wait for ever.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    result = await call
    if task is not None and task.cancelling() > before:
        raise asyncio.CancelledError
    return result


__all__ = [
    "TRANSIENT",
    "NoScriptError",
    "ReadOnlyError",
    "RedisError",
    "ResponseError",
    "SlotNotCoveredError",
    "TryAgainError",
    "heeding_cancellation",
    "is_missing_group",
    "translated",
]
