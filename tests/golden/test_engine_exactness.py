"""The demo model through scheduler, cache, runner and sampler: what others do changes no bit of anybody's answer."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest

from common.events import Grammar, SamplingParams, TokenLogprobs
from common.tokenization.tokenizer import Tokenizer
from engine_worker.config import ComputeSettings, ModelSettings, SchedulerSettings
from engine_worker.engine import Engine
from engine_worker.kv_cache.manager import KvCacheManager
from engine_worker.runner.kv_tensors import KvCachePlan
from engine_worker.runner.loading import LoadedModel, load_engine_model
from engine_worker.runner.model_runner import ModelRunner
from engine_worker.sampling.grammar_masks import GrammarCompiler
from engine_worker.sampling.sampler import Sampler
from engine_worker.scheduler.scheduler import Scheduler
from engine_worker.sequence import Sequence
from tests.demo_model import demo_model_dir

pytestmark = [pytest.mark.model, pytest.mark.timeout(240)]

MAX_MODEL_LEN = 512
BLOCK_SIZE = 32
STORY = "Once upon a time there was a miller who had three sons, a mill, a donkey and a cat. " * 6

_ids = itertools.count()

Answer = tuple[tuple[int, ...], tuple[TokenLogprobs | None, ...], tuple[TokenLogprobs, ...]]


@functools.cache
def model() -> LoadedModel:
    settings = ModelSettings(model=str(demo_model_dir()), max_model_len=MAX_MODEL_LEN)
    return load_engine_model(settings, ComputeSettings())


@functools.cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_json(model().tokenizer_json, model().tokenizer_config)


@functools.cache
def grammars() -> GrammarCompiler:
    return GrammarCompiler(model().tokenizer_json, model().vocab_size, model().eos_token_ids)


def sequence(text: str, *, arrival_s: float = 0.0, **sampling: Any) -> Sequence:
    number = next(_ids)
    return Sequence(
        seq_id=number,
        request_id=f"r{number}",
        choice=0,
        prompt_token_ids=tuple(tokenizer().encode(text)),
        sampling=SamplingParams(**{"max_tokens": 40, "eos_token_ids": model().eos_token_ids, **sampling}),
        max_model_len=MAX_MODEL_LEN,
        arrival_s=arrival_s,
    )


def answers(
    sequences: list[Sequence], *, num_blocks: int = 64, prefix_caching: bool = True, **settings: int
) -> list[Answer]:
    """Tokens, their log probabilities and those of the prompt, from one fresh engine."""
    scheduler = SchedulerSettings(**{"max_num_seqs": 8, **settings})
    kv_cache = KvCacheManager(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=prefix_caching,
    )
    plan = KvCachePlan(num_blocks, BLOCK_SIZE, 0, num_blocks * BLOCK_SIZE, MAX_MODEL_LEN)
    sampler = Sampler(model().vocab_size, grammars())
    runner = ModelRunner(model(), plan, scheduler, kv_cache.block_tables, sampler)
    engine = Engine(Scheduler(scheduler, kv_cache, MAX_MODEL_LEN), kv_cache, runner)
    engine.add(sequences)
    tokens: dict[int, list[TokenLogprobs | None]] = {item.seq_id: [] for item in sequences}
    prompts: dict[int, list[TokenLogprobs]] = {item.seq_id: [] for item in sequences}
    while engine.has_work:
        result = engine.step(0.0)
        assert result.failed == ()
        engine.check_invariants()
        for token in result.sampled:
            tokens[token.sequence.seq_id].append(token.logprobs)
        for scores in result.prompt_logprobs:
            prompts[scores.sequence.seq_id] += scores.logprobs
    return [(item.output_token_ids(), tuple(tokens[item.seq_id]), tuple(prompts[item.seq_id])) for item in sequences]


def mixed() -> list[Sequence]:
    """Long and short prompts, two with a common beginning, every way of sampling."""
    schema = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}'
    return [
        sequence(STORY + "The eldest", max_tokens=90, min_tokens=90, temperature=0.0, logprobs=2, arrival_s=1.0),
        sequence(STORY + "The youngest", max_tokens=90, min_tokens=90, seed=1, top_p=0.9, logprobs=0, arrival_s=2.0),
        sequence("The capital of France is", seed=2, temperature=1.2, logprobs=1, arrival_s=3.0),
        sequence("A cat named", seed=3, top_k=20, repetition_penalty=1.2, presence_penalty=0.3, arrival_s=4.0),
        sequence("JSON of a cat: ", seed=4, grammar=Grammar(kind="json_schema", source=schema), arrival_s=5.0),
        sequence(STORY[:150], temperature=0.0, prompt_logprobs=1, arrival_s=6.0),
    ]


@pytest.fixture(scope="module")
def alone() -> list[Answer]:
    if model().backend != "native":
        pytest.skip("only the native kernels promise results that do not depend on the batch")
    return [answers([item])[0] for item in mixed()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix_caching": False},
        {"max_num_batched_tokens": 24, "max_num_seqs": 6},  # chunks that end anywhere
        {"max_num_seqs": 2},
        {"num_blocks": 9},  # preempts
        {"num_blocks": 15, "max_num_batched_tokens": 40, "prefix_caching": False},
    ],
    ids=str,
)
def test_answers_do_not_depend_on_company_chunks_preemption_or_cache(
    alone: list[Answer], options: dict[str, Any]
) -> None:
    sequences = mixed()
    assert answers(sequences, **options) == alone
    assert any(item.num_preemptions for item in sequences) == ("num_blocks" in options)


def test_an_answer_continues_exactly_from_any_of_its_tokens(alone: list[Answer]) -> None:
    for number, (output, logprobs, _) in enumerate(alone[1:5], start=1):
        for cut in (1, len(output) // 2):
            original = mixed()[number]
            resumed = Sequence(
                seq_id=next(_ids),
                request_id="resumed",
                choice=0,
                prompt_token_ids=tuple(original.tokens[: original.num_prompt_tokens].tolist()),
                output_token_ids=output[:cut],
                sampling=original.sampling,
                max_model_len=MAX_MODEL_LEN,
            )
            assert answers([resumed])[0][:2] == (output, logprobs[cut:])
