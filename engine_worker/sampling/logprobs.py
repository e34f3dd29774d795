"""Log probabilities: from the raw logits, before any mask, bias, penalty or temperature."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.events import TokenLogprobs
from engine_worker.sampling.ranking import ranked
from engine_worker.sequence import Sequence
from engine_worker.step import PromptLogprobs, ScheduledSequence


def token_logprobs(logprobs: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """For each row its token's log probability and rank, and the ``num_top[i]`` most likely tokens.

    logprobs: fp32 [N, V], log-softmax of the raw logits. Rank 1 is the most likely; of equally likely tokens the
    lower id ranks first.
    """
    ids = torch.tensor(token_ids, dtype=torch.long, device=logprobs.device)[:, None]
    own = logprobs.gather(1, ids)
    k = min(max(num_top), logprobs.shape[1])
    top, top_ids = ranked(logprobs, max(k, 1))
    ranks = _ranks(logprobs, ids, own, top_ids)
    rows = zip(own[:, 0].tolist(), ranks, top_ids.tolist(), top.tolist(), num_top, strict=True)
    return [
        TokenLogprobs(logprob=value, rank=rank, top_ids=tuple(best[:n]), top_logprobs=tuple(values[:n]))
        for value, rank, best, values, n in rows
    ]


def prompt_positions(item: ScheduledSequence) -> range:
    """Prompt positions whose log probabilities this step's logits give; empty when none are wanted.

    Position p is scored by the logits of position p - 1: the runner needs the logits of positions
    ``p - 1 for p in prompt_positions(item)``, all of which lie inside the step's chunk.
    """
    sequence = item.sequence
    first = max(sequence.num_scored_tokens, item.start + 1)
    return range(first, min(item.start + item.num_tokens + 1, sequence.num_prompt_tokens))


def prompt_logprobs(logits: Tensor, sequence: Sequence, positions: range) -> PromptLogprobs:
    """Scores of consecutive prompt tokens; at least one.

    logits: fp32 [len(positions), V], row i those of position ``positions[i] - 1``; overwritten. A long chunk may be
    given in several slices, in order, to bound the memory of its logits.
    """
    token_ids = sequence.tokens[positions.start : positions.stop].tolist()
    num_top = [sequence.sampling.prompt_logprobs or 0] * len(token_ids)
    # In place: a fresh tensor of a vocabulary's width costs more in page faults than the softmax in arithmetic.
    scored = token_logprobs(torch.log_softmax(logits, dim=-1, out=logits), token_ids, num_top)
    return PromptLogprobs(sequence, positions.start, tuple(scored))


def _ranks(logprobs: Tensor, ids: Tensor, own: Tensor, top_ids: Tensor) -> list[int]:
    """Rank of each row's token: its place among the top ones, or else by counting all that come before it."""
    is_own = top_ids == ids
    ranks = is_own.int().argmax(1) + 1
    beyond = (~is_own.any(1)).nonzero().flatten()
    if len(beyond):
        count = _num_before if logprobs.device.type == "cpu" else _num_before_on_device
        ranks[beyond] = count(logprobs, ids, own, beyond) + 1
    result: list[int] = ranks.tolist()
    return result


def _num_before(logprobs: Tensor, ids: Tensor, own: Tensor, rows: Tensor) -> Tensor:
    """Tokens of each of ``rows`` that rank before its own. Row by row in numpy: a fiftieth of torch's time."""
    values = logprobs.numpy()
    wanted = zip(rows.tolist(), ids[rows, 0].tolist(), own[rows, 0].numpy(), strict=True)
    return torch.tensor(
        [
            np.count_nonzero(values[row] > value) + np.count_nonzero(values[row, :token] == value)
            for row, token, value in wanted
        ]
    )


def _num_before_on_device(logprobs: Tensor, ids: Tensor, own: Tensor, rows: Tensor) -> Tensor:
    chosen, value = logprobs[rows], own[rows]
    is_lower = torch.arange(chosen.shape[1], device=chosen.device) < ids[rows]
    return ((chosen > value) | ((chosen == value) & is_lower)).sum(1)
