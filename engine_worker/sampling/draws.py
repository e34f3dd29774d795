"""Drawing from a distribution by its inverse, one uniform a row.

Every operation works on each row by itself with an order of summation that the batch cannot change (softmax over the
last dimension, sums over runs of 64, cumulative sums), so a row's token is the same in any batch, bit for bit.

Scaled logits are logits minus their row's maximum, over the temperature. Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine_worker.sampling.ranking import ranked
from engine_worker.sampling.scratch import Scratch

NUM_CANDIDATES: Final = 256  # most likely tokens looked at before the whole vocabulary is
_RUN: Final = 64  # tokens summed at once


@dataclass(frozen=True, slots=True)
class Cuts:
    """Which of the most likely tokens may be drawn, one entry a row: [R]."""

    top_k: Tensor  # int64, 1 .. V; V = off
    top_p: Tensor  # double; infinite = off
    min_p: Tensor  # double; 0 = off

    def pick(self, rows: Tensor) -> Cuts:
        return Cuts(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def scale(logits: Tensor, maxima: Tensor, temperature: Tensor) -> Tensor:
    """In place: fp32 [R, V], [R], [R]. The maximum goes first, so that no temperature can overflow."""
    return logits.sub_(maxima[:, None]).div_(temperature[:, None])


def draw_from_all(scaled: Tensor, uniform: Tensor, scratch: Scratch) -> Tensor:
    """From the whole distribution: fp32 [R, V], double [R] -> int64 [R]."""
    return _draw_by_id(_softmax(scaled, scratch), uniform)


def draw_top_k(scaled: Tensor, uniform: Tensor, cuts: Cuts) -> Tensor:
    """From rows whose top_k is below `NUM_CANDIDATES`; top_p counts in shares of what top_k leaves."""
    values, ids = ranked(scaled, min(NUM_CANDIDATES, scaled.shape[1]))
    beyond = torch.arange(values.shape[1], device=scaled.device) >= cuts.top_k[:, None]
    probs = torch.softmax(values.double().masked_fill_(beyond, float("-inf")), dim=-1)
    return _draw_by_rank(probs * _kept(probs, cuts), ids, uniform)


def draw_top_p(scaled: Tensor, uniform: Tensor, cuts: Cuts, scratch: Scratch) -> Tensor:
    """From rows with any cuts. Those that may keep more than the candidates are drawn from the whole vocabulary."""
    probs = _softmax(scaled, scratch)
    _, ids = ranked(scaled, min(NUM_CANDIDATES, scaled.shape[1]))
    found = probs.gather(1, ids).double()
    kept = _kept(found, cuts)
    tokens = _draw_by_rank(found * kept, ids, uniform)
    if ids.shape[1] < scaled.shape[1]:
        wide = (kept[:, -1] | (cuts.top_k < scaled.shape[1])).nonzero().flatten()
        if len(wide):
            tokens[wide] = _draw_wide(probs[wide], uniform[wide], cuts.pick(wide))
    return tokens


def _draw_wide(probs: Tensor, uniform: Tensor, cuts: Cuts) -> Tensor:
    """As `draw_top_p`, by the least probability that is kept; of equal ones the lower ids are kept."""
    ordered = _falling(probs)
    share = ordered.double()
    share = share / share.cumsum(1).gather(1, cuts.top_k[:, None] - 1)  # of what top_k leaves
    num_kept = _kept(share, cuts).sum(1, keepdim=True)
    least = ordered.gather(1, num_kept - 1)
    above, equal = probs > least, probs == least
    spare = num_kept - above.sum(1, keepdim=True)
    return _draw_by_id(probs * (above | (equal & (equal.cumsum(1) <= spare))), uniform)


def _kept(probs: Tensor, cuts: Cuts) -> Tensor:
    """Which of the probabilities, given in falling order, the cuts leave, always the first: double, bool [R, K]."""
    rank = torch.arange(probs.shape[1], device=probs.device)
    before = probs.cumsum(1) - probs
    kept = (rank < cuts.top_k[:, None]) & (before < cuts.top_p[:, None])
    kept &= (probs >= cuts.min_p[:, None] * probs[:, :1]) & (probs > 0)
    kept[:, 0] = True
    return kept


def _draw_by_rank(probs: Tensor, ids: Tensor, uniform: Tensor) -> Tensor:
    """Inverse of the distribution over a few tokens: double [R, K] (any scale), int64 [R, K], double [R]."""
    reached = probs.cumsum(1)
    return ids.gather(1, _first_above(reached, uniform * reached[:, -1])[:, None])[:, 0]


def _draw_by_id(probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse of the distribution over all tokens in the order of their ids: fp32 [R, V] (any scale), double [R]."""
    runs = pad(probs, (0, -probs.shape[1] % _RUN)).view(len(probs), -1, _RUN)
    sums = runs.sum(2).double()
    reached = sums.cumsum(1)
    target = uniform * reached[:, -1]
    run = _first_above(reached, target)
    rows = torch.arange(len(probs), device=probs.device)
    inner = runs[rows, run].double().cumsum(1)
    # The run's sum in fp32 and in double differ in the last digits: the rest is a share of the one, taken of the other.
    share = (target - (reached[rows, run] - sums[rows, run])) / sums[rows, run]
    return run * _RUN + _first_above(inner, share.clamp(0, 1) * inner[:, -1])


def _first_above(reached: Tensor, target: Tensor) -> Tensor:
    """First column whose cumulative sum exceeds the target, and never one behind the last that adds anything."""
    column = torch.searchsorted(reached, target[:, None], right=True)
    last = torch.searchsorted(reached, reached[:, -1:].contiguous())
    return torch.minimum(column, last)[:, 0]


def _softmax(scaled: Tensor, scratch: Scratch) -> Tensor:
    return torch.softmax(scaled, dim=-1, out=scratch.like("probs", scaled))


def _falling(probs: Tensor) -> Tensor:
    """Rows sorted; numpy's vectorised sort is far ahead of torch's on a CPU."""
    if probs.device.type == "cpu":
        return torch.from_numpy(-np.sort(-probs.numpy(), axis=1))
    return probs.sort(dim=1, descending=True).values
