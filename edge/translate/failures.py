"""Failures in the log back to the errors that they were."""

from __future__ import annotations

from typing import Final

from common.errors import (
    ContextOverflow,
    DeadlineExceeded,
    EngineError,
    HeadraceError,
    InvalidRequest,
    LogUnavailable,
    ModelUnavailable,
    Overloaded,
    Quarantined,
    UnsupportedParameter,
    WeightsChanged,
)
from common.events import Failed

_KINDS: Final[dict[str, type[HeadraceError]]] = {
    kind.code: kind
    for kind in (
        ContextOverflow, DeadlineExceeded, EngineError, InvalidRequest, LogUnavailable, ModelUnavailable, Overloaded,
        Quarantined, UnsupportedParameter, WeightsChanged,
    )
}  # fmt: skip


def failure_of(failed: Failed) -> HeadraceError:
    """The typed error of a failed request; one of an unknown code is an `EngineError`."""
    return _KINDS.get(failed.code, EngineError)(failed.message, param=failed.param or None)


def deadline_passed() -> DeadlineExceeded:
    """For a request that its deadline ended: an error, since what there is of the answer is no answer."""
    return DeadlineExceeded("The request's deadline passed before it finished.")
