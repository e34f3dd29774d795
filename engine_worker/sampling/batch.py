"""What the sampler knows about a batch for as long as its composition stays: rows grouped by need, as tensors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from common.errors import InvalidRequest
from common.events import SamplingParams
from engine_worker.sampling.constraints import TokenConstraints, has_constraints
from engine_worker.sampling.draws import NUM_CANDIDATES, Cuts, draw_from_all, draw_top_k, draw_top_p, scale
from engine_worker.sampling.grammar_masks import GrammarCompiler, GrammarMatcher
from engine_worker.sampling.penalties import Penalties, has_penalties
from engine_worker.sampling.rng import UniformTable
from engine_worker.sampling.scratch import Scratch
from engine_worker.sampling.transfer import to_device
from engine_worker.sequence import Sequence
from engine_worker.step import RequestAtFault

_Rows = list[tuple[int, Sequence]]
_Draw = Callable[[Tensor, Tensor, Cuts, Scratch], Tensor]


class DrawGroup:
    """Rows that are drawn in the same way. Membership depends on the row's own parameters alone."""

    def __init__(self, rows: _Rows, draw: _Draw, vocab_size: int, device: torch.device) -> None:
        self._draw = draw
        self._index = torch.tensor([row for row, _ in rows], dtype=torch.long, device=device)
        self._sequences = [sequence for _, sequence in rows]
        sampling = [sequence.sampling for _, sequence in rows]
        self._temperature = torch.tensor([s.temperature for s in sampling], dtype=torch.float32, device=device)
        self._cuts = Cuts(
            top_k=torch.tensor(
                [min(s.top_k or vocab_size, vocab_size) for s in sampling], dtype=torch.long, device=device
            ),
            top_p=torch.tensor(
                [s.top_p if s.top_p < 1 else np.inf for s in sampling], dtype=torch.double, device=device
            ),
            min_p=torch.tensor([s.min_p for s in sampling], dtype=torch.double, device=device),
        )
        self._uniforms = UniformTable([s.seed for s in sampling], [s.choice for s in self._sequences])

    def draw(self, logits: Tensor, maxima: Tensor, token_ids: Tensor, scratch: Scratch) -> None:
        """Write this group's rows of ``token_ids``; its rows of ``logits`` may be overwritten."""
        uniform = to_device(self._uniforms.take([s.num_tokens for s in self._sequences]), logits.device)
        rows = scratch.rows("logits", logits, self._index)
        scaled = scale(rows, maxima[self._index], self._temperature)
        token_ids[self._index] = self._draw(scaled, uniform, self._cuts, scratch)


class Batch:
    """All state in it is a function of the sequences and their tokens, so it can be dropped and built at any time."""

    def __init__(
        self, rows: list[Sequence], vocab_size: int, grammars: GrammarCompiler | None, device: torch.device
    ) -> None:
        self.rows = list(rows)
        numbered = list(enumerate(rows))
        self.groups = _draw_groups(numbered, vocab_size, device)
        penalised = [(row, s) for row, s in numbered if has_penalties(s.sampling)]
        self.penalties = Penalties(penalised, device) if penalised else None
        constrained = [(row, s) for row, s in numbered if has_constraints(s.sampling)]
        self.constraints = TokenConstraints(constrained, vocab_size, device) if constrained else None
        self.failed: dict[int, str] = {}  # rows that no step can sample
        self.matchers = self._match_grammars(numbered, grammars)
        # Rows that want log probabilities, with the number of most likely tokens to show.
        self.num_top = {row: s.sampling.logprobs for row, s in numbered if s.sampling.logprobs is not None}
        self.scored = torch.tensor(list(self.num_top), dtype=torch.long, device=device) if self.num_top else None
        has_work = self.groups or penalised or constrained or self.matchers or self.failed or self.num_top
        self.wants_highest = not has_work
        """Whether every row simply takes its highest logit."""

    def _match_grammars(self, rows: _Rows, grammars: GrammarCompiler | None) -> dict[int, GrammarMatcher]:
        matchers = {}
        for row, sequence in rows:
            if sequence.sampling.grammar is None:
                continue
            if grammars is None:
                self.failed[row] = "this worker has no grammar compiler"
                continue
            try:
                matchers[row] = grammars.matcher(sequence)
            except InvalidRequest as error:
                self.failed[row] = RequestAtFault(error.message, error.param or "")
        return matchers


def is_greedy(sampling: SamplingParams) -> bool:
    return sampling.temperature == 0 or sampling.top_k == 1


def _draw_groups(rows: _Rows, vocab_size: int, device: torch.device) -> list[DrawGroup]:
    """Greedy rows are in none."""
    members: dict[_Draw, _Rows] = {_draw_from_all: [], _draw_top_k: [], draw_top_p: []}
    for row, sequence in rows:
        sampling = sequence.sampling
        if is_greedy(sampling):
            continue
        if 0 < sampling.top_k < min(NUM_CANDIDATES, vocab_size):
            draw = _draw_top_k
        elif 0 < sampling.top_k < vocab_size or sampling.top_p < 1 or sampling.min_p > 0:
            draw = draw_top_p
        else:
            draw = _draw_from_all
        members[draw].append((row, sequence))
    return [DrawGroup(group, draw, vocab_size, device) for draw, group in members.items() if group]


def _draw_from_all(scaled: Tensor, uniform: Tensor, cuts: Cuts, scratch: Scratch) -> Tensor:
    return draw_from_all(scaled, uniform, scratch)


def _draw_top_k(scaled: Tensor, uniform: Tensor, cuts: Cuts, scratch: Scratch) -> Tensor:
    return draw_top_k(scaled, uniform, cuts)
