"""From logits to tokens: batched, and for each row a function of that row, its request and its tokens alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine_worker.sampling.grammar_masks import GrammarCompiler
from engine_worker.sequence import Sequence
from engine_worker.step import SampledToken


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token a row in the rows' order; rows that could not be sampled are in ``failed`` instead, with the reason."""

    sampled: tuple[SampledToken, ...]
    failed: tuple[tuple[Sequence, str], ...] = ()


class Sampler:
    """Draws the next token of each row. Used by the engine thread alone."""

    def __init__(self, vocab_size: int, grammars: GrammarCompiler | None = None) -> None: ...

    def sample(self, logits: torch.Tensor, rows: list[Sequence]) -> SamplerOutput:
        """logits: fp32 [R, V], contiguous, overwritten. ``rows[i]`` is the sequence whose next token row i gives."""
        raise NotImplementedError
