"""Randomness without state: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

Key = the request's seed, counter = (position of the token in its sequence, choice, stream, 0). So a draw does not
depend on the batch, on a preemption, on a restart or on the worker that makes it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]
Doubles = npt.NDArray[np.float64]

_LOW: Final = np.uint64(0xFFFFFFFF)
_32: Final = np.uint64(32)
_ROUNDS: Final = 10


class Stream(IntEnum):
    """Independent draws for one position."""

    TARGET = 0  # the model's own sample
    DRAFT = 1  # a draft model's proposal
    ACCEPT = 2  # whether the proposal is taken
    RESIDUAL = 3  # the sample instead of a refused proposal


def philox(seeds: UInt64s, positions: UInt64s, choices: UInt64s, stream: int) -> tuple[UInt64s, UInt64s]:
    """The first two 32-bit words for each element; the arguments are broadcast against each other."""
    k0, k1 = seeds & _LOW, seeds >> _32
    c0, c1 = positions & _LOW, choices & _LOW
    c2, c3 = np.full_like(positions, stream), np.zeros_like(positions)
    for _ in range(_ROUNDS):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW, (k1 + np.uint64(0xBB67AE85)) & _LOW
    return c0, c1


def uniforms(seeds: UInt64s, positions: UInt64s, choices: UInt64s, stream: int = Stream.TARGET) -> Doubles:
    """One double in the open interval (0, 1) for each element, with 52 random bits."""
    c0, c1 = philox(seeds, positions, choices, stream)
    bits = (c0 << np.uint64(20)) | (c1 >> np.uint64(12))
    result: Doubles = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return result


class UniformTable:
    """Draws of a batch, computed some positions ahead: while the batch stays, a step costs one row of a table."""

    def __init__(self, seeds: list[int], choices: list[int], width: int = 16) -> None:
        self._seeds = np.array(seeds, dtype=np.uint64)[:, None]
        self._choices = np.array(choices, dtype=np.uint64)[:, None]
        self._width = width
        self._first = np.zeros(len(seeds), dtype=np.int64)
        self._table: Doubles = np.empty((len(seeds), 0))
        self._rows = np.arange(len(seeds))

    def take(self, positions: list[int]) -> Doubles:
        """The draw of each row for the token at its position: [rows]."""
        wanted = np.array(positions, dtype=np.int64)
        offsets = wanted - self._first
        if not ((offsets >= 0) & (offsets < self._table.shape[1])).all():
            ahead = (wanted[:, None] + np.arange(self._width)).astype(np.uint64)
            self._table = uniforms(self._seeds, ahead, self._choices)
            self._first = wanted
            offsets = np.zeros_like(wanted)
        result: Doubles = self._table[self._rows, offsets]
        return result
