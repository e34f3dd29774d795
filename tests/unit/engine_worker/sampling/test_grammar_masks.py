from __future__ import annotations

import json
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from common.errors import InvalidRequest
from common.events import Grammar
from engine_worker.sampling import grammar_masks
from engine_worker.sampling.grammar_masks import GrammarCompiler
from engine_worker.sampling.sampler import Sampler
from engine_worker.sequence import Sequence
from engine_worker.step import RequestAtFault
from tests.unit.engine_worker.sampling.reference import random_logits, sequence

EOS = 0
VOCAB_SIZE = 330  # wider than the tokenizer's 320, as padded embeddings are


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(['{"name": "anna", "age": 12, "tags": ["red", "green"]}'] * 20, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer.to_str().encode(), VOCAB_SIZE, (EOS,))


def json_schema(schema: object) -> Grammar:
    return Grammar(kind="json_schema", source=json.dumps(schema))


def generate(grammars: GrammarCompiler, row: Sequence, limit: int = 200, seed: int = 0) -> tuple[int, ...]:
    """Until EOS, from logits that change from step to step."""
    sampler = Sampler(VOCAB_SIZE, grammars)
    for step in range(row.num_output_tokens, limit):
        output = sampler.sample(random_logits(1, VOCAB_SIZE, seed=1000 * seed + step), [row])
        assert output.failed == ()
        row.append(output.sampled[0].token_id)
        if output.sampled[0].token_id == EOS:
            return row.output_token_ids()
    raise AssertionError("no end within the limit")


PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["anna", "😀", "Zoë\n"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(4))
def test_json_schema_with_emoji_gives_valid_json_and_then_eos(
    grammars: GrammarCompiler, tokenizer: Tokenizer, seed: int
) -> None:
    row = sequence(seed=seed, grammar=json_schema(PERSON), eos_token_ids=(EOS,))
    *tokens, last = generate(grammars, row, seed=seed)
    value = json.loads(tokenizer.decode(tokens, skip_special_tokens=False))
    assert last == EOS
    assert value["name"] in PERSON["properties"]["name"]["enum"]  # type: ignore[index]
    assert value["age"] <= 99


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar(kind="regex", source="[ab]{2}c+d"), "[ab]{2}c+d"),
        (Grammar(kind="choice", source='["yes", "no", "perhaps \\"so\\" 😀"]'), 'yes|no|perhaps "so" 😀'),
        (Grammar(kind="lark", source='start: "x" ("y" | "z")'), "x[yz]"),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_other_kinds_of_grammar_hold(
    grammars: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, pattern: str
) -> None:
    row = sequence(temperature=0.0, grammar=grammar, eos_token_ids=(EOS,))
    text = tokenizer.decode(generate(grammars, row)[:-1], skip_special_tokens=False)
    assert re.fullmatch(pattern, text)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="choice", source='["a<eos>b"]'),
        Grammar(kind="lark", source='start: "a<eos>b"'),
        json_schema({"const": "a<eos>b"}),
        Grammar(kind="regex", source="a<eos>b"),
    ],
    ids=lambda grammar: grammar.kind,
)
def test_a_literal_that_reads_as_a_control_token_is_text(
    grammars: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar
) -> None:
    tokens = generate(grammars, sequence(temperature=0.0, grammar=grammar, eos_token_ids=(EOS,)))
    assert tokens.index(EOS) == len(tokens) - 1
    assert tokenizer.decode(list(tokens[:-1]), skip_special_tokens=False).strip('"') == "a<eos>b"


def test_white_space_is_bounded(grammars: GrammarCompiler, tokenizer: Tokenizer) -> None:
    row = sequence(temperature=0.0, grammar=json_schema({"type": "array", "items": {"type": "null"}}))
    sampler = Sampler(VOCAB_SIZE, grammars)
    space = tokenizer.encode(" ").ids[0]
    for _ in range(200):
        logits = torch.zeros(1, VOCAB_SIZE)
        logits[0, space] = 9.0
        output = sampler.sample(logits, [row])
        assert output.failed == (), row.output_token_ids()
        row.append(output.sampled[0].token_id)
    assert " " * 65 not in tokenizer.decode(list(row.output_token_ids()))


@pytest.mark.parametrize("cut", [1, 3, 7])
def test_replaying_the_output_gives_the_state_that_was_lost(grammars: GrammarCompiler, cut: int) -> None:
    whole = sequence(seed=5, grammar=json_schema(PERSON), eos_token_ids=(EOS,))
    expected = generate(grammars, whole, seed=5)
    resumed = sequence(output=expected[:cut], seed=5, grammar=json_schema(PERSON), eos_token_ids=(EOS,))
    assert generate(grammars, resumed, seed=5) == expected


def test_a_broken_grammar_state_fails_only_its_own_sequence(grammars: GrammarCompiler) -> None:
    logits = random_logits(3, VOCAB_SIZE)
    good, plain = sequence(grammar=json_schema(PERSON)), sequence(seed=1)
    broken = sequence(output=[17, 18, 19], grammar=json_schema(PERSON))  # output that the grammar does not allow
    output = Sampler(VOCAB_SIZE, grammars).sample(logits, [good, broken, plain])
    assert [token.sequence for token in output.sampled] == [good, plain]
    assert [failed for failed, _ in output.failed] == [broken]
    assert "grammar" in output.failed[0][1]
    assert not isinstance(output.failed[0][1], RequestAtFault), "the request has done nothing wrong"


def test_a_grammar_that_grows_too_large_on_the_way_is_the_fault_of_its_request_alone(
    grammars: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    large = Grammar(kind="lark", source='start: "b" "a"{1000000}', param="structured_outputs.grammar")
    good, bad = sequence(seed=1), sequence(output=[tokenizer.token_to_id("b")], grammar=large)
    output = Sampler(VOCAB_SIZE, grammars).sample(random_logits(2, VOCAB_SIZE), [good, bad])
    assert [token.sequence for token in output.sampled] == [good]
    ((failed, reason),) = output.failed
    assert failed is bad
    assert isinstance(reason, RequestAtFault)
    assert reason.param == "structured_outputs.grammar"
    assert "too large" in reason


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (json_schema({"$ref": "#"}), "json_schema"),
        (json_schema({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}), "json_schema"),
        (json_schema({"type": "strin"}), "no such type"),
        (json_schema({"type": "string", "minLength": 3, "maxLength": 1}), "nothing can match"),
        (json_schema([1]), "must be a JSON object"),
        (Grammar(kind="json_schema", source="{bad"), "not JSON"),
        (Grammar(kind="regex", source="(a"), "regex"),
        (Grammar(kind="lark", source="start: nowhere"), "nowhere"),
        (Grammar(kind="choice", source="[]"), "list of strings"),
        (Grammar(kind="choice", source='{"a": 1}'), "list of strings"),
        (Grammar(kind="magic", source=""), "unknown kind"),
    ],
    ids=str,
)
def test_bad_grammars_are_refused_at_intake_and_fail_their_row(
    grammars: GrammarCompiler, grammar: Grammar, words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        grammars.compile(grammar)
    row = sequence(grammar=grammar)
    output = Sampler(VOCAB_SIZE, grammars).sample(random_logits(1, VOCAB_SIZE), [row])
    assert output.sampled == ()
    assert words in output.failed[0][1]


def test_a_grammar_without_a_compiler_fails_its_row() -> None:
    output = Sampler(VOCAB_SIZE).sample(random_logits(1, VOCAB_SIZE), [sequence(grammar=json_schema({}))])
    assert output.sampled == ()


def test_compiled_grammars_are_kept_up_to_a_limit(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_masks, "MAX_GRAMMARS", 2)
    for text in ("p", "q", "r"):
        grammars.compile(Grammar(kind="regex", source=text))
    row = sequence(temperature=0.0, grammar=Grammar(kind="regex", source="p"), eos_token_ids=(EOS,))
    assert len(generate(grammars, row)) == 2  # compiled again
