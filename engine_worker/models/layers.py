"""Parts that decoders share: where weights come from, and the embedding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from engine_worker.kernels.ops import DenseWeight, QuantizedWeight, Weight
from engine_worker.kernels.packing import GROUP, dequantize

_FEW_TOKENS: Final = 64


class WeightSource(Protocol):
    """A checkpoint's tensors under transformers' names, in the format in which the model is served.

    Each method raises `CheckpointMismatch` for a tensor that is missing or not of the shape given.
    """

    def has(self, name: str) -> bool: ...

    def matrices(self, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> list[Weight]:
        """Matrices that will be stacked: all in one format."""
        ...

    def head(self, name: str, shape: tuple[int, int]) -> Weight: ...

    def embedding(self, name: str, shape: tuple[int, int]) -> Weight: ...

    def vector(self, name: str, size: int) -> Tensor:
        """fp32 [size]."""
        ...


class Embedding:
    """Rows of a matrix by token id; a quantised matrix stays quantised."""

    def __init__(self, weight: Weight, scale: float, device: torch.device) -> None:
        self._scale = scale
        self._weight = _to_device(weight, device)
        self._is_on_cpu = device.type == "cpu"

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int [T] -> fp32 [T, D]."""
        if self._is_on_cpu and len(token_ids) <= _FEW_TOKENS:
            rows = _few_rows(self._weight, token_ids)
        else:
            rows = _rows(self._weight, token_ids)
        return rows if self._scale == 1.0 else rows * self._scale


def _rows(weight: Weight, token_ids: Tensor) -> Tensor:
    """fp32 [T, D]."""
    if isinstance(weight, DenseWeight):
        return functional.embedding(token_ids, weight.values).float()
    mins = None if weight.mins is None else weight.mins[token_ids]
    return dequantize(QuantizedWeight(weight.values[token_ids], weight.scales[token_ids], mins))


def _few_rows(weight: Weight, token_ids: Tensor) -> Tensor:
    """The same numbers, bit for bit, by the calling thread alone.

    torch shares even eight rows among its threads: where others want one of their CPUs, that took 0.6 ms of a step.
    """
    ids = token_ids.numpy()
    if isinstance(weight, DenseWeight):
        return _picked(weight.values, ids)
    picked = weight.values.numpy()[ids].reshape(len(ids), -1, GROUP)
    groups = picked * _picked(weight.scales, ids).numpy()[..., None]
    if weight.mins is not None:
        groups += _picked(weight.mins, ids).numpy()[..., None]
    return torch.from_numpy(groups.reshape(len(ids), -1))


def _picked(values: Tensor, ids: npt.NDArray[np.int32]) -> Tensor:
    """Some rows of a matrix of floats, as fp32."""
    if values.dtype is not torch.bfloat16:
        return torch.from_numpy(values.numpy()[ids].astype(np.float32))
    bits = values.view(torch.int16).numpy()[ids].astype(np.int32) << 16  # the upper half of an fp32
    return torch.from_numpy(bits.view(np.float32))


def stack(weights: Sequence[Weight]) -> Weight:
    """Rows of several matrices of one format, one after the other."""
    if len(weights) == 1:
        return weights[0]
    dense = [weight.values for weight in weights if isinstance(weight, DenseWeight)]
    if len(dense) == len(weights):
        return DenseWeight(torch.cat(dense))
    quantized = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    mins = [weight.mins for weight in quantized if weight.mins is not None]
    assert len(quantized) == len(weights), "matrices of different formats cannot be stacked"
    assert len(mins) in (0, len(quantized)), "matrices of different formats cannot be stacked"
    values = torch.cat([weight.values for weight in quantized])
    scales = torch.cat([weight.scales for weight in quantized])
    return QuantizedWeight(values, scales, torch.cat(mins) if mins else None)


def rows(weight: Weight, start: int, stop: int) -> Weight:
    """Some rows of a matrix."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.values[start:stop])
    mins = None if weight.mins is None else weight.mins[start:stop]
    return QuantizedWeight(weight.values[start:stop], weight.scales[start:stop], mins)


def _to_device(weight: Weight, device: torch.device) -> Weight:
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.values.to(device))
    mins = None if weight.mins is None else weight.mins.to(device)
    return QuantizedWeight(weight.values.to(device), weight.scales.to(device), mins)
