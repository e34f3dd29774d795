"""Log probabilities: from the raw logits, before any mask, bias, penalty or temperature."""

from __future__ import annotations

import torch

from engine_worker.sequence import Sequence
from engine_worker.step import PromptLogprobs, ScheduledSequence


def prompt_positions(item: ScheduledSequence) -> range:
    """Prompt positions whose log probabilities this step's logits give; empty when none are wanted.

    Position p is scored by the logits of position p - 1: the runner needs the logits of positions
    ``p - 1 for p in prompt_positions(item)``, all of which lie inside the step's chunk.
    """
    raise NotImplementedError


def prompt_logprobs(logits: torch.Tensor, sequence: Sequence, positions: range) -> PromptLogprobs:
    """logits: fp32 [len(positions), V], row i those of position ``positions[i] - 1``; not changed."""
    raise NotImplementedError
