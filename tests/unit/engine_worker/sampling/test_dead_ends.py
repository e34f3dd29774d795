from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.events import Grammar
from engine_worker.sampling.grammar_masks import GrammarCompiler
from engine_worker.sampling.sampler import Sampler
from engine_worker.sequence import Sequence
from engine_worker.step import RequestAtFault
from tests.unit.engine_worker.sampling.reference import random_logits, sequence

EOS = 0
VOCAB_SIZE = 257


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Every byte is a token, and one ends the text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": EOS} | {character: i + 1 for i, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


@pytest.fixture(scope="module")
def sampler(tokenizer: Tokenizer) -> Sampler:
    return Sampler(VOCAB_SIZE, GrammarCompiler(tokenizer.to_str().encode(), VOCAB_SIZE, (EOS,)))


def choice(*texts: str) -> Grammar:
    return Grammar(kind="choice", source=json.dumps(texts), param="structured_outputs.choice")


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    found: list[int] = tokenizer.encode(text).ids
    return found


def go_on(sampler: Sampler, row: Sequence, steps: int) -> str:
    """The reason of a failure on the way, or an empty text."""
    for step in range(steps):
        output = sampler.sample(random_logits(1, VOCAB_SIZE, seed=step), [row])
        if output.failed:
            return output.failed[0][1]
        row.append(output.sampled[0].token_id)
    return ""


@pytest.mark.parametrize("draw", [{"temperature": 0.0}, {"seed": 3}, {"seed": 3, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("logprobs", [None, 2])
def test_the_end_of_a_grammar_is_the_end_however_few_tokens_there_are(
    sampler: Sampler, tokenizer: Tokenizer, draw: dict[str, Any], logprobs: int | None
) -> None:
    row = sequence(grammar=choice("ab"), min_tokens=30, eos_token_ids=(EOS,), logprobs=logprobs, **draw)
    assert go_on(sampler, row, 3) == ""
    assert list(row.output_token_ids()) == [*ids(tokenizer, "ab"), EOS]


def test_where_a_grammar_may_go_on_the_text_has_its_least_length(sampler: Sampler, tokenizer: Tokenizer) -> None:
    grammar = Grammar(kind="regex", source="a+")
    row = sequence(grammar=grammar, min_tokens=12, eos_token_ids=(EOS,), seed=1)
    assert go_on(sampler, row, 12) == ""
    assert list(row.output_token_ids()) == ids(tokenizer, "a") * 12


def test_a_bad_word_ends_the_text_where_the_grammar_may_end(sampler: Sampler, tokenizer: Tokenizer) -> None:
    (b,) = ids(tokenizer, "b")
    row = sequence(grammar=choice("a", "ab"), bad_words_token_ids=((b,),), min_tokens=5, eos_token_ids=(EOS,))
    assert go_on(sampler, row, 2) == ""
    assert list(row.output_token_ids()) == [*ids(tokenizer, "a"), EOS]


def test_constraints_that_leave_nothing_are_the_request_s_fault_and_named(
    sampler: Sampler, tokenizer: Tokenizer
) -> None:
    (b,) = ids(tokenizer, "b")
    good = sequence(seed=1)
    bad = sequence(
        output=ids(tokenizer, "a"), grammar=choice("ab"), bad_words_token_ids=((b,),), eos_token_ids=(EOS,), seed=1
    )
    output = sampler.sample(random_logits(2, VOCAB_SIZE), [good, bad])
    assert [token.sequence for token in output.sampled] == [good]
    ((failed, reason),) = output.failed
    assert failed is bad
    assert isinstance(reason, RequestAtFault)
    assert reason.param == "structured_outputs.choice"
    assert "structured_outputs.choice, bad_words together: after 1 tokens" in reason


def test_tokens_that_a_request_allows_and_its_grammar_does_not(sampler: Sampler, tokenizer: Tokenizer) -> None:
    row = sequence(grammar=choice("ab"), allowed_token_ids=tuple(ids(tokenizer, "xyz")), eos_token_ids=(EOS,))
    reason = go_on(sampler, row, 1)
    assert isinstance(reason, RequestAtFault)
    assert "allowed_token_ids" in reason


def test_a_model_that_computes_nothing_is_no_fault_of_its_request(sampler: Sampler) -> None:
    output = sampler.sample(torch.full((1, VOCAB_SIZE), -torch.inf), [sequence(seed=1)])
    assert not isinstance(output.failed[0][1], RequestAtFault)
