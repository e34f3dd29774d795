"""Range checks whose refusals name the field, the bound and the value."""

from __future__ import annotations

import math
from collections.abc import Sequence

from common.errors import InvalidRequest
from edge.openai.decoding import echo


def refuse(param: str, rule: str, value: object) -> InvalidRequest:
    """The error for a value that breaks ``rule`` ("must be ...")."""
    return InvalidRequest(f"{param} {rule}, got {echo(value)}", param=param)


def check_float(param: str, value: float, low: float, high: float, *, open_low: bool = False) -> float:
    """``value`` if it is finite and in [low, high], or (low, high] with ``open_low``."""
    if not math.isfinite(value) or not (low < value if open_low else low <= value) or value > high:
        bracket = "(" if open_low else "["
        raise refuse(param, f"must be in {bracket}{low:g}, {high:g}]", value)
    return value


def check_int(param: str, value: int, low: int, high: int) -> int:
    """``value`` if it is in [low, high]."""
    if not low <= value <= high:
        raise refuse(param, f"must be from {low} to {high}", value)
    return value


def check_token_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """``token_ids`` if all of them are in the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"{param}: token id {echo(token_id)} is out of vocabulary (0 to {vocab_size - 1})", param=param
            )
    return tuple(token_ids)
