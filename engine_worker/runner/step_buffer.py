"""A step's integers in one piece of memory, so that they reach the model's device in one copy."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32s = npt.NDArray[np.int32]
_ALIGNMENT: Final = 16  # integers: kernels are compiled for pointers aligned alike, whatever the sizes of a step


class StepBuffer:
    """int32 sections on the host, and the same sections on the device, one after the other.

    A section's place follows from the sizes asked for with and before it: steps of equal sizes find theirs at the same
    addresses, which is what a recorded graph reads. On the CPU both are one memory, unless ``is_mirrored``.
    """

    def __init__(self, capacity: int, device: torch.device, *, is_mirrored: bool) -> None:
        """``capacity``: integers, without the gaps of alignment."""
        size = capacity + 16 * _ALIGNMENT
        self._is_cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=self._is_cuda)
        self._array: Int32s = self._host.numpy()
        self._device = torch.zeros(size, dtype=torch.int32, device=device) if is_mirrored else self._host
        self._is_mirrored = is_mirrored
        self._places: list[slice] = []
        self._used = 0
        self._sent: torch.cuda.Event | None = None

    def begin(self) -> None:
        """Forget the last step's sections, once their copy is through."""
        if self._sent is not None:
            self._sent.synchronize()
        self._places.clear()
        self._used = 0

    def section(self, size: int) -> Int32s:
        """A further section, to be filled before `send`."""
        place = slice(self._used, self._used + size)
        self._places.append(place)
        self._used = -(-place.stop // _ALIGNMENT) * _ALIGNMENT
        return self._array[place]

    def send(self) -> list[Tensor]:
        """All sections on the device, in order, valid until the next `begin`."""
        if self._is_mirrored:
            self._device[: self._used].copy_(self._host[: self._used], non_blocking=True)
        if self._is_cuda:
            self._sent = self._sent or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._sent.record()
        return [self._device[place] for place in self._places]
