"""Buffers of a vocabulary's width, kept between steps: a fresh one costs more in page faults than in arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """Named buffers that grow to the largest batch seen. What a buffer holds is lost when it is asked for again."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def like(self, name: str, model: Tensor) -> Tensor:
        """Uninitialised, with the shape, type and device of ``model``, [R, V]."""
        return self.take(name, len(model), model)

    def take(self, name: str, num_rows: int, model: Tensor) -> Tensor:
        """Uninitialised [num_rows, V], with the width, type and device of ``model``."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < num_rows or buffer.shape[1] != model.shape[1]:
            buffer = self._buffers[name] = torch.empty(
                (num_rows, model.shape[1]), dtype=model.dtype, device=model.device
            )
        return buffer[:num_rows]

    def rows(self, name: str, model: Tensor, index: Tensor) -> Tensor:
        """A copy of some rows of ``model``; of all of them, when ``index`` has as many, ``model`` itself."""
        if len(index) == len(model):
            return model
        return torch.index_select(model, 0, index, out=self.take(name, len(index), model))
