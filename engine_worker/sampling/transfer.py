"""Small arrays to the device of the logits, without waiting for what that device still computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """On the CPU the same memory; on a GPU a copy in the order of its stream, from memory that the GPU can read."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
