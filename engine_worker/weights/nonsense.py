"""Model files that can be read and make no sense."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import CheckpointMismatch
from common.telemetry.logging import get_logger

# What a field of a wrong kind, a count of zero or a list without an end comes to, wherever it is first used.
_SIGNS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
logger = get_logger(__name__)


@contextmanager
def refused_as_nonsense(source: str) -> Iterator[None]:
    """Raises `CheckpointMismatch` for everything that files of a model can make go wrong without saying so: starting
    again would not mend them. ``source``: how the model was named."""
    try:
        yield
    except _SIGNS as error:
        logger.warning("a model cannot be read", model=source, exc_info=error)
        raise CheckpointMismatch(
            f"the files of {source!r} do not make sense ({type(error).__name__}: {str(error)[:200]})", param="model"
        ) from error
