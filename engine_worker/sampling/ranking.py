"""The most likely tokens in an order that nothing but the row decides: by falling value, equal values by token id."""

from __future__ import annotations

from torch import Tensor


def ranked(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The first ``k`` of each row: values [R, V] -> (values [R, k], token ids int64 [R, k]); k <= V.

    Among tokens at -inf the order is undefined: nobody may draw them.
    """
    found, ids = values.topk(min(k + 1, values.shape[1]))
    tied = (found[:, 1:] == found[:, :-1]) & (found[:, 1:] > float("-inf"))
    if bool(tied.any()):
        # topk leaves open which of equal values it takes and how it orders them.
        for row in tied[:, k - 1 : k].any(1).nonzero().flatten().tolist():  # a tie across the cut
            candidates = (values[row] >= found[row, k - 1]).nonzero().flatten()
            order = values[row, candidates].sort(descending=True, stable=True).indices[:k]
            ids[row, :k] = candidates[order]
        ids = ids[:, :k].sort(dim=1).values
        found, order = values.gather(1, ids).sort(dim=1, descending=True, stable=True)
        ids = ids.gather(1, order)
    return found[:, :k], ids[:, :k]
