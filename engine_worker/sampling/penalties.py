"""Repetition, frequency and presence penalties, sparse: only tokens that a sequence holds are ever touched.

v = v / repetition  if v > 0 else  v * repetition        for tokens of the prompt or the output
v = v - frequency * count - presence * (count > 0)       with the token's count in the output
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from common.events import SamplingParams
from engine_worker.sampling.transfer import to_device
from engine_worker.sequence import Sequence


def has_penalties(sampling: SamplingParams) -> bool:
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


class TokenCounts:
    """Distinct tokens of one sequence with their count in the output. Catches up with the tokens when asked."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence
        # Frequency and presence look at the output alone.
        with_prompt = sequence.sampling.repetition_penalty != 1.0
        prompt = np.unique(sequence.tokens[: sequence.num_prompt_tokens]) if with_prompt else np.empty(0, np.int32)
        self._index = {token: index for index, token in enumerate(prompt.tolist())}
        self._ids = np.zeros(len(prompt) + 64, dtype=np.int64)
        self._ids[: len(prompt)] = prompt
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._num_seen = sequence.num_prompt_tokens

    def catch_up(self) -> tuple[np.ndarray, np.ndarray]:
        """(distinct token ids int64 [K], counts in the output float32 [K]), valid until the next call."""
        sequence = self._sequence
        for token in sequence.tokens[self._num_seen : sequence.num_tokens].tolist():
            index = self._index.setdefault(token, len(self._index))
            if index == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[index] = token
            self._counts[index] += 1
        self._num_seen = sequence.num_tokens
        return self._ids[: len(self._index)], self._counts[: len(self._index)]


class Penalties:
    """The rows of a batch that have penalties; there is at least one."""

    def __init__(self, rows: list[tuple[int, Sequence]], device: torch.device) -> None:
        self._device = device
        self._rows = np.array([row for row, _ in rows], dtype=np.int64)
        self._counts = [TokenCounts(sequence) for _, sequence in rows]
        sampling = [sequence.sampling for _, sequence in rows]
        self._repetition = np.array([s.repetition_penalty for s in sampling], dtype=np.float32)
        self._frequency = np.array([s.frequency_penalty for s in sampling], dtype=np.float32)
        self._presence = np.array([s.presence_penalty for s in sampling], dtype=np.float32)

    def apply(self, logits: Tensor) -> None:
        """logits: fp32 [R, V], changed in place."""
        found = [counts.catch_up() for counts in self._counts]
        lengths = [len(ids) for ids, _ in found]
        counts = np.concatenate([count for _, count in found])
        subtract = np.repeat(self._frequency, lengths) * counts + np.repeat(self._presence, lengths) * (counts > 0)
        rows = self._tensor(np.repeat(self._rows, lengths))
        ids = self._tensor(np.concatenate([ids for ids, _ in found]))
        repetition = self._tensor(np.repeat(self._repetition, lengths))
        values = logits[rows, ids]
        values = torch.where(values > 0, values / repetition, values * repetition) - self._tensor(subtract)
        logits[rows, ids] = values

    def _tensor(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)
