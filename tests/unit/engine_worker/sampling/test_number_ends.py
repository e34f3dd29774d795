from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from common.events import Grammar
from engine_worker.sampling.grammar_masks import GrammarCompiler
from engine_worker.sampling.number_ends import MAX_DIGITS, digits_at_the_end
from engine_worker.sampling.sampler import Sampler
from engine_worker.sequence import Sequence
from tests.unit.engine_worker.sampling.reference import sequence

EOS = 0
LIMIT = 200  # tokens


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes, and two tokens with more digits in them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": EOS} | {character: i + 1 for i, character in enumerate(alphabet)}
    vocabulary |= {"77": len(vocabulary), "777": len(vocabulary) + 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("7", "7"), ("77", "7")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


@pytest.fixture(scope="module")
def sampler(tokenizer: Tokenizer) -> Sampler:
    size = tokenizer.get_vocab_size()
    return Sampler(size, GrammarCompiler(tokenizer.to_str().encode(), size, (EOS,)))


def stuck(sampler: Sampler, tokenizer: Tokenizer, row: Sequence, favourite: str) -> str:
    """What a model writes that wants nothing but one token, a little of others, and the end least of all."""
    logits = torch.zeros(1, tokenizer.get_vocab_size())
    logits[0, tokenizer.token_to_id(favourite)] = 9.0
    logits[0, EOS] = -1.0
    while row.num_output_tokens < LIMIT:
        output = sampler.sample(logits.clone(), [row])
        assert output.failed == ()
        row.append(output.sampled[0].token_id)
        if output.sampled[0].token_id == EOS:
            break
    text: str = tokenizer.decode(row.output_token_ids(), skip_special_tokens=True)
    return text


def row_of(grammar: Grammar, **sampling: Any) -> Sequence:
    return sequence(grammar=grammar, eos_token_ids=(EOS,), temperature=0.0, **sampling)


def json_schema(schema: object) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(schema))


NUMBER = {"type": "number"}


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": NUMBER}, "required": ["a"], "additionalProperties": False},
        {"type": "array", "items": {"type": "number", "minimum": 0}, "minItems": 1, "maxItems": 2},
        NUMBER,
        {"type": "integer"},
        {"enum": [1.5]},
    ],
    ids=str,
)
@pytest.mark.parametrize("favourite", ["7", "77", "777"])
def test_a_model_that_is_stuck_in_digits_ends_its_number(
    sampler: Sampler, tokenizer: Tokenizer, schema: dict[str, Any], favourite: str
) -> None:
    row = row_of(json_schema(schema))
    text = stuck(sampler, tokenizer, row, favourite)
    assert row.output_token_ids()[-1] == EOS
    assert max(len(run) for run in "".join(c if c.isdigit() else " " for c in text).split()) <= MAX_DIGITS + 2
    json.loads(text)


def test_numbers_inside_a_composed_grammar_end_too(sampler: Sampler, tokenizer: Tokenizer) -> None:
    """After its beginning, which no model that is stuck would write."""
    grammar = Grammar(kind="lark", source=f'start: %json {json.dumps({"type": "array", "items": NUMBER})} "!"')
    text = stuck(sampler, tokenizer, row_of(grammar, output=[tokenizer.token_to_id("[")]), "7")
    assert text.startswith("[" + "7" * MAX_DIGITS)
    assert "7" * (MAX_DIGITS + 3) not in text


@pytest.mark.parametrize(
    "grammar",
    [
        json_schema({"type": "string", "maxLength": 60}),
        json_schema({"type": "string", "pattern": "^[0-9]{60}$"}),
        json_schema({"enum": ["7" * 60]}),
        Grammar(kind="regex", source="[0-9]{60}"),
        Grammar(kind="regex", source="[0-9]{1,60}"),
    ],
    ids=str,
)
def test_digits_that_are_no_number_of_json_are_as_many_as_the_grammar_lets_be(
    sampler: Sampler, tokenizer: Tokenizer, grammar: Grammar
) -> None:
    text = stuck(sampler, tokenizer, row_of(grammar), "7")
    assert text.strip('"') == "7" * 60


def test_a_number_goes_on_after_a_failover_as_it_would_have_gone(sampler: Sampler, tokenizer: Tokenizer) -> None:
    whole = row_of(json_schema({"type": "array", "items": NUMBER, "minItems": 1, "maxItems": 1}))
    text = stuck(sampler, tokenizer, whole, "7")
    for cut in (3, MAX_DIGITS, MAX_DIGITS + 1):
        rest = row_of(whole.sampling.grammar or json_schema({}), output=whole.output_token_ids()[:cut])
        assert stuck(sampler, tokenizer, rest, "7") == text


@pytest.mark.parametrize(
    ("text", "before", "length"),
    [(b"12", 3, 5), (b"a12", 3, 2), (b"12a", 3, 0), (b"", 3, 3), (b"1.5", 9, 1), ("é1".encode(), 1, 1)],
)
def test_runs_of_digits_are_counted_over_the_borders_of_tokens(text: bytes, before: int, length: int) -> None:
    assert digits_at_the_end(text, before) == length
