"""Rows of every kind in batches whose members, size and order change with each step: a row draws, scores and fails as
it would alone, from a sampler that has seen nothing before."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.events import Grammar
from engine_worker.sampling.grammar_masks import GrammarCompiler
from engine_worker.sampling.sampler import Sampler, SamplerOutput
from engine_worker.sequence import Sequence
from tests.unit.engine_worker.sampling.reference import random_logits, sequence

VOCAB_SIZE = 330
EOS = 256
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 5, "repetition_penalty": 1.4},
    {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.4},
    {"temperature": 0.0, "logit_bias": {3: 4.0, 9: -100.0}},
    {"temperature": 0.0, "min_tokens": 20, "eos_token_ids": (EOS,)},
    {"temperature": 0.0, "bad_words_token_ids": ((3,), (5, 6))},
    {"temperature": 0.0, "allowed_token_ids": (7, 8, 9), "logprobs": 2},
    {"temperature": 0.0, "grammar": Grammar(kind="regex", source="[a-c]{50}"), "logprobs": 3},
    {"grammar": Grammar(kind="regex", source="[x-z]{4}"), "eos_token_ids": (EOS,)},
    {"grammar": Grammar(kind="choice", source='["<|end|>", "aa"]')},
    {"grammar": Grammar(kind="regex", source="(")},
    {},
    {"top_k": 20, "logprobs": 1},
    {"top_p": 0.7},
    {"min_p": 0.1, "temperature": 1.5, "frequency_penalty": 0.3},
    {"top_k": 300, "top_p": 0.9, "logprobs": 20},
]


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return GrammarCompiler(tokenizer.to_str().encode(), VOCAB_SIZE, (EOS,))


def told(output: SamplerOutput) -> dict[Sequence, Any]:
    drawn = {token.sequence: (token.token_id, token.logprobs) for token in output.sampled}
    assert not drawn.keys() & dict(output.failed).keys()
    return {**drawn, **{row: str(reason) for row, reason in output.failed}}


@pytest.mark.parametrize("seed", range(6))
def test_a_row_is_treated_as_if_it_were_alone(grammars: GrammarCompiler, seed: int) -> None:
    draw = random.Random(seed)
    rows = [sequence(output=[5, 6, 5][: i % 4], seed=i, **KINDS[i % len(KINDS)]) for i in range(64)]
    for row in rows:  # what comes out of a grammar must be its own
        if row.sampling.grammar is not None and row.num_output_tokens:
            rows[rows.index(row)] = sequence(seed=row.sampling.seed, **KINDS[rows.index(row) % len(KINDS)])
    sampler = Sampler(VOCAB_SIZE, grammars)
    batch = list(rows)
    for step in range(15):
        if draw.random() < 0.7:
            batch = draw.sample(rows, draw.randint(1, len(rows)))
            if draw.random() < 0.3:  # only the highest logits
                batch = [row for row in batch if row.sampling == rows[0].sampling] or batch
        logits = random_logits(len(batch), VOCAB_SIZE, seed=1000 * seed + step)
        for row in range(len(batch)):
            if draw.random() < 0.03:
                logits[row, draw.choice([0, 5, 300])] = draw.choice([float("nan"), float("inf"), float("-inf")])
            if draw.random() < 0.02:
                logits[row] = float("-inf")
        together = told(sampler.sample(logits.clone(), batch))
        assert len(together) == len(batch)
        for k, row in enumerate(batch):
            alone = told(Sampler(VOCAB_SIZE, grammars).sample(logits[k : k + 1].clone(), [row]))
            assert repr(alone[row]) == repr(together[row]), (step, row.sampling)
        for row, outcome in together.items():
            if not isinstance(outcome, str):
                row.append(outcome[0])


def test_what_is_seen_of_the_logits_is_a_copy(grammars: GrammarCompiler) -> None:
    """The next step overwrites the buffers of this one."""
    row = sequence(temperature=0.0, logprobs=3)
    sampler = Sampler(VOCAB_SIZE, grammars)
    first = sampler.sample(random_logits(1, VOCAB_SIZE), [row])
    before = repr(first)
    sampler.sample(torch.zeros(1, VOCAB_SIZE), [row])
    assert repr(first) == before
