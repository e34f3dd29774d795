"""Perplexity and agreement from scores."""

from __future__ import annotations

import math

import pytest

from bench.quality import TEXT, Scores, against, table
from common.events import TokenLogprobs


def token(logprob: float, best: int) -> TokenLogprobs:
    return TokenLogprobs(logprob=logprob, rank=1, top_ids=(best,), top_logprobs=(logprob,))


def test_a_mode_is_measured_against_the_reference() -> None:
    reference = Scores((token(-1.0, 5), token(-3.0, 6)), ((1, 2, 3), (4, 5, 6)), "native")
    scores = Scores((token(-1.5, 5), token(-3.0, 7)), ((1, 2, 9), (4, 5, 6)), "native")
    quality = against("int4", scores, reference)
    assert quality.perplexity == pytest.approx(math.exp(2.25))
    assert quality.top1_agreement == 0.5
    assert quality.mean_shift == pytest.approx(0.25)
    assert quality.agreed_tokens == 2.5
    assert quality.num_answers == 2
    assert "| int4 (native) | 9.488 | 0.500 |" in table([quality])


def test_the_text_is_there_and_long_enough_to_say_something() -> None:
    assert len(TEXT.read_text(encoding="utf-8").split()) > 500
