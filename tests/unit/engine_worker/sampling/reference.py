"""Sampling done the slow and obvious way, and sequences to sample for."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from common.events import SamplingParams
from engine_worker.sequence import Sequence

_ids = itertools.count(1)


def sequence(
    prompt: Seq[int] = (1, 2, 3), output: Seq[int] = (), *, choice: int = 0, max_tokens: int = 100_000, **sampling: Any
) -> Sequence:
    return Sequence(
        seq_id=next(_ids),
        request_id="r",
        choice=choice,
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(output),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        max_model_len=len(prompt) + len(output) + min(max_tokens, 50_000),
    )


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=generator) * 3


def adjusted(logits: npt.NDArray[np.float64], row: Sequence) -> npt.NDArray[np.float64]:
    """Logits of one row after bias, allowed and bad tokens, min_tokens and penalties, dense and token by token."""
    sampling, out = row.sampling, Counter(row.output_token_ids())
    seen = set(row.tokens[: row.num_prompt_tokens].tolist()) | set(out)
    result = logits.astype(np.float64).copy()
    for token, bias in sampling.logit_bias.items():
        result[token] += bias
    for token in range(len(result)):
        if sampling.allowed_token_ids and token not in sampling.allowed_token_ids:
            result[token] = -np.inf
        if row.num_output_tokens < sampling.min_tokens and token in sampling.eos_token_ids + sampling.stop_token_ids:
            result[token] = -np.inf
        for word in sampling.bad_words_token_ids:
            head = word[:-1]
            if token == word[-1] and row.output_token_ids()[row.num_output_tokens - len(head) :] == head:
                result[token] = -np.inf
        if token in seen:
            positive = result[token] > 0
            penalty = sampling.repetition_penalty
            result[token] = result[token] / penalty if positive else result[token] * penalty
        result[token] -= sampling.frequency_penalty * out[token] + sampling.presence_penalty * (out[token] > 0)
    return result


def distribution(logits: npt.NDArray[np.float64], row: Sequence) -> npt.NDArray[np.float64]:
    """Exact probabilities of one row's next token, by sorting everything."""
    sampling, values = row.sampling, adjusted(logits, row)
    order = np.lexsort((np.arange(len(values)), -values))
    if sampling.temperature == 0:
        p = np.zeros(len(values))
        p[order[0]] = 1
        return p
    weights = np.exp((values - values.max()) / sampling.temperature)
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    weights /= weights.sum()
    if sampling.top_p < 1:
        falling = weights[order]
        weights[order[np.cumsum(falling) - falling >= sampling.top_p]] = 0
    weights[weights < sampling.min_p * weights.max()] = 0
    result: npt.NDArray[np.float64] = weights / weights.sum()
    return result
