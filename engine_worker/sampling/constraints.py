"""logit_bias, allowed_token_ids, bad words and min_tokens: what a request says about single tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.events import SamplingParams
from engine_worker.sampling.transfer import to_device
from engine_worker.sequence import Sequence

NEVER = float("-inf")


def has_constraints(sampling: SamplingParams) -> bool:
    return bool(
        sampling.logit_bias or sampling.allowed_token_ids or sampling.bad_words_token_ids or sampling.min_tokens
    )


class TokenConstraints:
    """The rows of a batch that have such constraints. Token ids outside the vocabulary are ignored."""

    def __init__(self, rows: list[tuple[int, Sequence]], vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        self._vocab_size = vocab_size
        self._device = device
        bias = [
            (row, token, value)
            for row, sequence in rows
            for token, value in sequence.sampling.logit_bias.items()
            if 0 <= token < vocab_size
        ]
        self._bias_index = self._index([(row, token) for row, token, _ in bias])
        self._bias = torch.tensor([value for _, _, value in bias], dtype=torch.float32, device=device)
        self._allowed = [
            (row, torch.tensor(self._known(sequence.sampling.allowed_token_ids), dtype=torch.long, device=device))
            for row, sequence in rows
            if sequence.sampling.allowed_token_ids
        ]

    def apply(self, logits: Tensor) -> None:
        """logits: fp32 [R, V], changed in place."""
        if len(self._bias):
            logits[self._bias_index] += self._bias
        for row, allowed in self._allowed:
            kept = logits[row, allowed]
            logits[row].fill_(NEVER)
            logits[row, allowed] = kept
        forbidden = [(row, token) for row, sequence in self._rows for token in self._known(_forbidden(sequence))]
        if forbidden:
            logits[self._index(forbidden)] = NEVER

    def _known(self, tokens: tuple[int, ...]) -> list[int]:
        return [token for token in tokens if 0 <= token < self._vocab_size]

    def _index(self, pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        index = to_device(np.array(pairs, dtype=np.int64).reshape(-1, 2), self._device)
        return index[:, 0], index[:, 1]


def _forbidden(sequence: Sequence) -> tuple[int, ...]:
    """Tokens that must not come next, given the output so far."""
    sampling = sequence.sampling
    tokens: tuple[int, ...] = ()
    if sequence.num_output_tokens < sampling.min_tokens:
        tokens += sampling.eos_token_ids + sampling.stop_token_ids
    for word in sampling.bad_words_token_ids:
        if _ends_with(sequence, word[:-1]):
            tokens += word[-1:]
    return tokens


def _ends_with(sequence: Sequence, tokens: tuple[int, ...]) -> bool:
    """Whether the output ends with ``tokens``; it always ends with ()."""
    count = len(tokens)
    if count > sequence.num_output_tokens:
        return False
    last: list[int] = sequence.tokens[sequence.num_tokens - count : sequence.num_tokens].tolist()
    return last == list(tokens)
