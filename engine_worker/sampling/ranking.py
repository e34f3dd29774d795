"""The most likely tokens in an order that nothing but the row decides: by falling value, equal values by token id."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def ranked(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first ``k`` of each row: fp32 [R, V] -> (values [R, k], token ids int64 [R, k]); k <= V.

    Where fewer than ``k`` tokens are above -inf, the rest of the row is filled with any token at -inf. A row may be nan
    throughout, as the softmax of what is not finite is: any tokens are its first.
    """
    if values.device.type != "cpu":
        return ranked_on_device(values, k)
    rows = values.numpy()
    ids = torch.from_numpy(np.stack([_ranked_ids(row, k) for row in rows]))
    return values.gather(1, ids), ids


def ranked_on_device(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`ranked` in torch alone, and without asking the device for anything in between.

    topk leaves open which of equal values it takes and how it orders them, and in 16-bit models many are equal. So it
    is given keys that differ: the value's bits, made to sort as integers, above the id counted from the end.
    """
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0, which it equals
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    keys = keys.mul_(1 << 32).add_(torch.arange(values.shape[1] - 1, -1, -1, device=values.device))
    ids = values.shape[1] - 1 - (keys.topk(k).values & 0xFFFFFFFF)
    return values.gather(1, ids), ids


def _ranked_ids(row: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    """numpy's vectorised selection takes a fraction of the time of torch's topk, on one thread."""
    edge = np.partition(row, len(row) - k)[len(row) - k]  # the k-th largest
    if np.isnan(edge):
        return np.arange(k)
    if edge == -np.inf:
        ids = np.flatnonzero(row > edge)
        ids = np.concatenate([ids, np.full(k - len(ids), row.argmin())])
    else:
        above = np.flatnonzero(row > edge)
        ids = np.concatenate([above, np.flatnonzero(row == edge)[: k - len(above)]])
    result: npt.NDArray[np.int64] = ids[np.argsort(-row[ids], kind="stable")]
    return result
