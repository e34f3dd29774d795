"""What every kind of weight file offers, and the format in which a model takes its weights from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from torch import Tensor

from common.errors import CheckpointMismatch
from engine_worker.kernels.ops import DenseWeight, Weight
from engine_worker.kernels.packing import dequantize, quantize_int4, quantize_int8

StoredFormat = Literal["none", "int8", "int4"]
_RICHNESS: tuple[StoredFormat, ...] = ("int4", "int8", "none")


class Checkpoint(Protocol):
    """Tensors by the names that transformers gives them. Reading one costs its bytes, opening the file does not."""

    paths: tuple[Path, ...]  # the weight files

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises `CheckpointMismatch` when there is no such tensor."""
        ...

    def stored_format(self, name: str) -> StoredFormat:
        """What comes closest to how the file holds a matrix: "none" is dense."""
        ...

    def weight(self, name: str) -> Weight:
        """A matrix, in the file's own bits where `Weight` can hold them, else in fp32."""
        ...

    def vector(self, name: str) -> Tensor:
        """A norm weight or a bias: fp32 [size], a copy."""
        ...


class FormattedWeights:
    """A checkpoint whose matrices come in the format asked for; shapes are checked on the way."""

    def __init__(self, checkpoint: Checkpoint, quantization: Literal["auto", "none", "int8", "int4"]) -> None:
        """``quantization``: "auto" keeps each matrix as the file has it; "none" makes all of them dense."""
        self._checkpoint = checkpoint
        self._quantization = quantization

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name."""
        return self._checkpoint.has(name)

    def matrices(self, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> list[Weight]:
        """Matrices that will be stacked: all in one format, the richest of theirs.

        Raises `CheckpointMismatch` for one that is missing or of another shape.
        """
        for name, shape in zip(names, shapes, strict=True):
            self._check(name, shape)
        target = max((self._target(name) for name in names), key=_RICHNESS.index)
        return [convert(self._checkpoint.weight(name), target) for name in names]

    def head(self, name: str, shape: tuple[int, int]) -> Weight:
        """The output head, which is never coarser than int8."""
        self._check(name, shape)
        target = self._target(name)
        return convert(self._checkpoint.weight(name), "int8" if target == "int4" else target)

    def embedding(self, name: str, shape: tuple[int, int]) -> Weight:
        """As the file has it: rows are only looked up. What has no `Weight` of its own is kept in 8 bits."""
        self._check(name, shape)
        weight = self._checkpoint.weight(name)
        was_widened = isinstance(weight, DenseWeight) and self._checkpoint.stored_format(name) != "none"
        return convert(weight, "int8") if was_widened and self._quantization != "none" else weight

    def vector(self, name: str, size: int) -> Tensor:
        """fp32 [size]. Raises `CheckpointMismatch`."""
        self._check(name, (size,))
        return self._checkpoint.vector(name)

    def _target(self, name: str) -> StoredFormat:
        return self._checkpoint.stored_format(name) if self._quantization == "auto" else self._quantization

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found = self._checkpoint.shape(name)
        if found != shape:
            raise CheckpointMismatch(
                f"{name} is {list(found)} in the checkpoint, the configuration makes it {list(shape)}", param="model"
            )


def convert(weight: Weight, target: StoredFormat) -> Weight:
    """``weight`` in ``target``; unchanged, bit for bit, where it is in it already."""
    if isinstance(weight, DenseWeight):
        if target == "none" or weight.values.shape[1] % 32:
            return weight
        return quantize_int8(weight.values) if target == "int8" else quantize_int4(weight.values)
    is_int4 = weight.mins is not None
    if target == ("int4" if is_int4 else "int8"):
        return weight
    return convert(DenseWeight(dequantize(weight)), target)
