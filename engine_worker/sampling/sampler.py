"""From logits to tokens: batched, and for each row a function of that row, its request and its tokens alone.

Order: log probabilities (of the raw logits), grammar mask, logit_bias / allowed tokens / bad words / min_tokens,
penalties, temperature, top_k, top_p, min_p, draw. What no row of the batch needs is not done.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from common.events import TokenLogprobs
from engine_worker.sampling.batch import Batch
from engine_worker.sampling.dead_ends import without_a_token
from engine_worker.sampling.grammar_masks import GrammarCompiler
from engine_worker.sampling.logprobs import token_logprobs
from engine_worker.sampling.scratch import Scratch
from engine_worker.sequence import Sequence
from engine_worker.step import SampledToken

# Logits that one thread gets through before others have been woken, let alone waited for on a busy machine.
_SMALL: Final = 1 << 21
_NOTHING_LEFT: Final = "no token can be drawn: the highest logit is -inf"


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token a row in the rows' order; rows that could not be sampled are in ``failed`` instead, with the reason."""

    sampled: tuple[SampledToken, ...]
    failed: tuple[tuple[Sequence, str], ...] = ()


class Sampler:
    """Draws the next token of each row. Used by the engine thread alone."""

    def __init__(self, vocab_size: int, grammars: GrammarCompiler | None = None) -> None:
        """``vocab_size``: width of the logits. Without ``grammars`` requests that have a grammar fail."""
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._batch: Batch | None = None
        self._scratch = Scratch()

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: list[Sequence]) -> SamplerOutput:
        """logits: fp32 [R, V], contiguous, overwritten. ``rows[i]`` is the sequence whose next token row i gives."""
        if not rows:
            return SamplerOutput(sampled=())
        if self._batch is None or self._batch.rows != rows:
            self._batch = Batch(rows, self._vocab_size, self._grammars, logits.device)
        if self._batch.wants_highest and logits.device.type == "cpu" and (drawn := _highest(logits, self._batch)):
            return drawn
        with one_thread_if(logits.numel() <= _SMALL):
            return self._sample(logits, self._batch)

    def _sample(self, logits: Tensor, batch: Batch) -> SamplerOutput:
        raw = self._raw_logprobs(logits, batch)
        failed = dict(batch.failed)
        for row, matcher in batch.matchers.items():
            reason = matcher.mask(logits[row])
            if reason is not None:
                failed[row] = reason
        if batch.constraints is not None:
            batch.constraints.apply(logits)
        if batch.penalties is not None:
            batch.penalties.apply(logits)
        token_ids = _draw(logits, batch, failed, self._scratch)
        _end_or_blame(batch, token_ids, failed)
        return _output(batch, token_ids, _scores(raw, batch, token_ids, failed), failed)

    def _raw_logprobs(self, logits: Tensor, batch: Batch) -> Tensor | None:
        """fp32 [rows that want log probabilities, V]; a copy, since ``logits`` are about to change."""
        if batch.scored is None:
            return None
        wanted = self._scratch.rows("scored", logits, batch.scored)
        return torch.log_softmax(wanted, dim=-1, out=self._scratch.like("logprobs", wanted))


def _highest(logits: Tensor, batch: Batch) -> SamplerOutput | None:
    """The highest logit of each row, the first of equal ones; None where one is not finite."""
    values = logits.numpy()
    token_ids = values.argmax(1).tolist()  # several times as fast as torch's
    for row, token_id in enumerate(token_ids):
        if not math.isfinite(values.item(row, token_id)):
            return None
    return SamplerOutput(tuple(map(SampledToken, batch.rows, token_ids)))


@contextmanager
def one_thread_if(is_small: bool) -> Iterator[None]:
    """Keep torch's operators on the calling thread; no result depends on the number of threads."""
    num_threads = torch.get_num_threads()
    if is_small and num_threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if is_small and num_threads > 1:
            torch.set_num_threads(num_threads)


def _draw(logits: Tensor, batch: Batch, failed: dict[int, str], scratch: Scratch) -> list[int]:
    """A token for each row; rows without a token that may be drawn are added to ``failed``."""
    if logits.device.type != "cpu":
        return draw_on_device(logits, batch, failed, scratch)
    token_ids = torch.from_numpy(logits.numpy().argmax(1))  # several times as fast as torch's; the first of equal ones
    maxima = logits.gather(1, token_ids[:, None])[:, 0]
    for row, maximum in enumerate(maxima.tolist()):
        if not math.isfinite(maximum):
            failed.setdefault(row, _cannot_draw(maximum))
            logits[row] = maxima[row] = 0.0  # so that what follows need not mind
    for group in batch.groups:
        group.draw(logits, maxima, token_ids, scratch)
    result: list[int] = token_ids.tolist()
    return result


def draw_on_device(logits: Tensor, batch: Batch, failed: dict[int, str], scratch: Scratch) -> list[int]:
    """The same without asking the device in between: once, at the end, for tokens and highest logits together."""
    token_ids = logits.argmax(1)
    maxima = logits.gather(1, token_ids[:, None])[:, 0]
    if batch.groups:
        unusable = ~maxima.isfinite()
        logits.masked_fill_(unusable[:, None], 0.0)
        usable = maxima.masked_fill(unusable, 0.0)
        for group in batch.groups:
            group.draw(logits, usable, token_ids, scratch)
    drawn, highest = torch.stack([token_ids.double(), maxima.double()]).tolist()
    for row, maximum in enumerate(highest):
        if not math.isfinite(maximum):
            failed.setdefault(row, _cannot_draw(maximum))
    return [int(token) for token in drawn]


def _cannot_draw(maximum: float) -> str:
    return _NOTHING_LEFT if maximum == -math.inf else f"no token can be drawn: the highest logit is {maximum}"


def _end_or_blame(batch: Batch, token_ids: list[int], failed: dict[int, str]) -> None:
    """Rows whose request forbids every token: they end where their grammar lets them, and fail by its fault else."""
    for row in [row for row, reason in failed.items() if reason is _NOTHING_LEFT]:
        outcome = without_a_token(batch.rows[row], batch.matchers.get(row))
        if isinstance(outcome, int):
            token_ids[row] = outcome
            del failed[row]
        elif outcome is not None:
            failed[row] = outcome


def _scores(raw: Tensor | None, batch: Batch, token_ids: list[int], failed: dict[int, str]) -> dict[int, TokenLogprobs]:
    """Rows with logits that are not finite are added to ``failed``, also where a mask hid these from the draw."""
    if raw is None:
        return {}
    scores = token_logprobs(raw, [token_ids[row] for row in batch.num_top], list(batch.num_top.values()))
    found = dict(zip(batch.num_top, scores, strict=True))
    for row, score in found.items():
        if math.isnan(score.logprob):
            failed.setdefault(row, "no token can be scored: a logit is not finite")
    return found


def _output(
    batch: Batch, token_ids: list[int], scores: dict[int, TokenLogprobs], failed: dict[int, str]
) -> SamplerOutput:
    return SamplerOutput(
        sampled=tuple(
            SampledToken(sequence, token_id, scores.get(row))
            for row, (sequence, token_id) in enumerate(zip(batch.rows, token_ids, strict=True))
            if row not in failed
        ),
        failed=tuple((batch.rows[row], reason) for row, reason in failed.items()),
    )
