"""The sampler against a dense reference, against exact distributions, and against itself in other batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_worker.sampling.sampler import Sampler, SamplerOutput
from engine_worker.sequence import Sequence
from tests.unit.engine_worker.sampling.reference import adjusted, distribution, random_logits, sequence


def sample(logits: torch.Tensor, rows: list[Sequence], sampler: Sampler | None = None) -> list[int]:
    output = (sampler or Sampler(logits.shape[1])).sample(logits.clone(), rows)
    assert output.failed == ()
    assert [token.sequence for token in output.sampled] == rows
    return [token.token_id for token in output.sampled]


def test_greedy_takes_the_lowest_of_equal_maxima() -> None:
    logits = torch.zeros(3, 1000)
    logits[0, [700, 30, 999]] = 5.0
    logits[1, 999] = 1.0
    rows = [sequence(temperature=0.0), sequence(temperature=0.0), sequence(temperature=0.7, top_k=1)]
    assert sample(logits, rows) == [30, 999, 0]


def test_no_rows_give_nothing() -> None:
    assert Sampler(10).sample(torch.empty(0, 10), []).sampled == ()


CUTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 7},
    {"top_k": 300},
    {"top_p": 0.6},
    {"top_p": 0.999, "temperature": 2.0},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 400, "top_p": 0.9, "min_p": 0.001, "temperature": 2.0},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
    {"top_p": 0.5, "min_p": 0.2},
]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("vocab_size", [50, 1000])
def test_draws_follow_the_exact_distribution(cuts: dict[str, Any], vocab_size: int) -> None:
    num_draws, width = 6_000, 300
    logits = random_logits(1, vocab_size, seed=vocab_size)
    expected = distribution(logits[0].double().numpy(), sequence(**cuts)) * num_draws
    rows = [sequence(seed=row, **cuts) for row in range(width)]
    sampler, batch = Sampler(vocab_size), logits.expand(width, -1)
    counts = np.zeros(vocab_size)
    for _ in range(num_draws // width):
        for row, token in zip(rows, sample(batch, rows, sampler), strict=True):
            counts[token] += 1
            row.append(token)
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    observed, wanted = counts[common], expected[common]
    if not common.all():
        observed, wanted = np.append(observed, counts[~common].sum()), np.append(wanted, expected[~common].sum())
    wanted = np.maximum(wanted, 1e-9)
    degrees = max(1, (wanted > 1).sum() - 1)
    chi2 = ((observed - wanted) ** 2 / wanted)[wanted > 1].sum()
    assert chi2 < degrees + 5 * np.sqrt(2 * degrees)


@pytest.mark.parametrize("vocab_size", [64, 1000, 5000])
def test_a_row_alone_gives_the_token_it_gives_in_any_batch(vocab_size: int) -> None:
    kinds = [*CUTS, {"temperature": 0.0}, {"temperature": 0.0, "presence_penalty": 1.0}, {"logit_bias": {3: 5.0}}]
    rows = [sequence(output=[5, 6, 5], seed=i, **kinds[i % len(kinds)]) for i in range(3 * len(kinds))]
    logits = random_logits(len(rows), vocab_size)
    together = sample(logits, rows)
    assert [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)] == together
    order = np.random.default_rng(0).permutation(len(rows)).tolist()
    assert sample(logits[order], [rows[i] for i in order]) == [together[i] for i in order]


def test_choices_of_one_seed_differ_and_equal_ones_agree() -> None:
    logits = random_logits(1, 1000).expand(3, -1) * 0.1
    first, twin, other = sample(logits, [sequence(seed=9), sequence(seed=9), sequence(seed=9, choice=1)])
    assert first == twin
    assert first != other


def test_a_resumed_sequence_draws_what_it_would_have_drawn() -> None:
    logits = [random_logits(1, 300, seed=i) for i in range(12)]
    params: dict[str, Any] = {"seed": 4, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.2}
    whole, sampler = sequence(**params), Sampler(300)
    for step in logits:
        whole.append(sample(step, [whole], sampler)[0])
    for cut in (1, 5, 11):
        resumed = sequence(output=whole.output_token_ids()[:cut], **params)
        for step in logits[cut:]:
            resumed.append(sample(step, [resumed])[0])
        assert resumed.output_token_ids() == whole.output_token_ids()


def test_candidates_tied_across_the_cut_are_taken_by_token_id() -> None:
    logits = torch.zeros(1, 600)
    logits[0, 500:] = 1.0  # a hundred equal ones; top_k=10 keeps the first ten of them
    drawn = {sample(logits, [sequence(seed=seed, top_k=10)])[0] for seed in range(300)}
    assert drawn == set(range(500, 510))
    flat = {sample(torch.zeros(1, 600), [sequence(seed=seed, top_p=0.501)])[0] for seed in range(3000)}
    assert max(flat) == 300  # of six hundred equally likely ones the first 301
    assert len(flat) > 290


def test_masked_tokens_are_never_drawn_however_little_is_left() -> None:
    logits = torch.full((64, 5000), -80.0)
    rows = [sequence(seed=i, allowed_token_ids=(4097,), **CUTS[i % len(CUTS)]) for i in range(64)]
    assert set(sample(logits, rows)) == {4097}


def test_tiny_and_huge_temperatures_stay_finite() -> None:
    logits = random_logits(2, 1000) * 10
    cold = sample(logits, [sequence(temperature=1e-30), sequence(temperature=1e-30, top_p=0.9)])
    assert cold == logits.argmax(1).tolist()
    sample(logits, [sequence(temperature=1e30), sequence(temperature=1e30, top_p=0.9)])


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("cuts", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 5}], ids=str)
def test_a_row_without_finite_logits_fails_alone(bad: float, cuts: dict[str, Any]) -> None:
    logits = random_logits(3, 400)
    rows = [sequence(seed=i, **cuts) for i in range(3)]
    expected = sample(logits, rows)
    logits[1] = bad
    output = Sampler(400).sample(logits.clone(), rows)
    assert [token.token_id for token in output.sampled] == [expected[0], expected[2]]
    assert [(s, "no token can be drawn" in reason) for s, reason in output.failed] == [(rows[1], True)]


_sampling = st.fixed_dictionaries(
    {},
    optional={
        "logit_bias": st.dictionaries(st.integers(0, 39), st.floats(-100, 100), max_size=5),
        "allowed_token_ids": st.lists(st.integers(0, 39), min_size=3, max_size=20, unique=True).map(tuple),
        "bad_words_token_ids": st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=4).map(
            tuple
        ),
        "min_tokens": st.integers(0, 6),
        "eos_token_ids": st.just((0,)),
        "stop_token_ids": st.just((1, 2)),
        "repetition_penalty": st.floats(0.1, 3),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
    },
)
_tokens = st.lists(st.integers(0, 4), max_size=8)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(_sampling, _tokens), min_size=1, max_size=5))
def test_constraints_and_penalties_equal_the_dense_reference(cases: list[tuple[dict[str, Any], list[int]]]) -> None:
    rows = [sequence(prompt=[3, 4, 30], output=output, temperature=0.0, **params) for params, output in cases]
    logits = random_logits(len(rows), 40, seed=len(rows))
    seen, sampler = logits.clone(), Sampler(40)
    output = sampler.sample(seen, rows)
    assert_adjusted(rows, logits, seen, output)
    for token in output.sampled:  # and once more, after catching up by a token
        token.sequence.append(token.token_id)
    again = logits.clone()
    assert_adjusted(rows, logits, again, sampler.sample(again, rows))


def assert_adjusted(rows: list[Sequence], logits: torch.Tensor, seen: torch.Tensor, output: SamplerOutput) -> None:
    """Each row of ``seen`` is as the dense reference makes it; one that leaves no token at all has failed instead."""
    failed = {id(row) for row, _ in output.failed}
    for row, before, after in zip(rows, logits, seen, strict=True):
        expected = adjusted(before.double().numpy(), row)
        assert (id(row) in failed) == bool(np.isneginf(expected).all())
        if id(row) not in failed:
            np.testing.assert_allclose(after.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_token_ids_outside_the_vocabulary_are_ignored() -> None:
    odd = sequence(temperature=0.0, logit_bias={99: 5.0, -1: 5.0, 3: 90.0}, bad_words_token_ids=((70,),))
    assert sample(torch.zeros(1, 50), [odd]) == [3]


def test_many_distinct_tokens_outgrow_the_first_buffer() -> None:
    row = sequence(prompt=range(100), output=range(50, 400), temperature=0.0, presence_penalty=1.0)
    logits = torch.zeros(1, 500)
    sampler = Sampler(500)
    sampler.sample(logits, [row])
    assert logits[0, 50:400].tolist() == [-1.0] * 350
    assert logits[0, :50].tolist() == [0.0] * 50
