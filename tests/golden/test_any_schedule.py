"""Whatever is scheduled beside a request, in whatever chunks, from the cache or again: its logits are the same bits.

On the native kernels, in every format, over a small random model. What is compared are the raw logits that each token
was drawn from, the tokens, and the log probabilities of prompts: all of them exactly, against the request by itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.events import FinishReason, SamplingParams, TokenLogprobs
from engine_worker.config import ComputeSettings, ModelSettings, SchedulerSettings
from engine_worker.engine import Engine
from engine_worker.kv_cache.manager import KvCacheManager
from engine_worker.runner.kv_tensors import KvCachePlan
from engine_worker.runner.loading import LoadedModel, load_engine_model
from engine_worker.runner.model_runner import ModelRunner
from engine_worker.sampling.sampler import Sampler, SamplerOutput
from engine_worker.scheduler.scheduler import Scheduler
from engine_worker.sequence import Sequence, SequenceStatus
from tests.unit.engine_worker.kernels.native import needs_native
from tests.unit.engine_worker.models.tiny_models import VOCAB_SIZE, make_model

pytestmark = needs_native

BLOCK_SIZE = 32
MAX_MODEL_LEN = 192
FORMATS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "bf16, KV int8": {"dtype": "bfloat16", "kv_cache_dtype": "int8"},
    "int4, KV int8": {"quantization": "int4", "kv_cache_dtype": "int8"},
}
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"seed": 11},
    {"seed": 12, "temperature": 1.4, "top_p": 0.8},
    {"seed": 13, "top_k": 7, "frequency_penalty": 0.7},
    {"seed": 14, "min_p": 0.05, "repetition_penalty": 1.1, "logit_bias": {3: 2.0, 9: -100.0}},
    {"seed": 15, "temperature": 0.7, "logprobs": 3},
)

Load = Callable[[str, int], LoadedModel]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    directory = tmp_path_factory.mktemp("tiny")
    make_model("smollm2", directory)
    return functools.cache(lambda name, threads: _load(directory, name, threads))


def _load(directory: Path, name: str, threads: int) -> LoadedModel:
    model = ModelSettings(model=str(directory), max_model_len=MAX_MODEL_LEN, **FORMATS[name])
    return load_engine_model(model, ComputeSettings(backend="native", num_threads=threads))


@dataclass(frozen=True)
class Request:
    """``arrives``, ``cancelled``: steps. Prompts of one ``family`` begin with the same tokens."""

    family: int
    length: int
    max_tokens: int
    way: int
    scores: bool
    arrives: int = 0
    cancelled: int | None = None
    priority: int = 0

    def sequence(self, seq_id: int) -> Sequence:
        shared = min(self.length, 70)
        tail = range(shared, self.length)
        prompt = [(self.family * 5 + i * i) % VOCAB_SIZE for i in range(shared)] + [(7 * i) % 90 for i in tail]
        scores = {"prompt_logprobs": 2} if self.scores else {}
        return Sequence(
            seq_id=seq_id,
            request_id=f"r{seq_id}",
            choice=0,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=self.max_tokens, **WAYS[self.way], **scores),
            max_model_len=MAX_MODEL_LEN,
            arrival_s=float(self.arrives),
            priority=self.priority,
        )

    def alone(self) -> Request:
        return Request(self.family, self.length, self.max_tokens, self.way, self.scores)


class Recording(Sampler):
    """Keeps the raw logits that each token was drawn from."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self.logits: dict[tuple[int, int], bytes] = {}  # by sequence and position

    def sample(self, logits: Tensor, rows: list[Sequence]) -> SamplerOutput:
        for row, sequence in enumerate(rows):
            self.logits[sequence.seq_id, sequence.num_tokens] = logits[row].numpy().tobytes()
        return super().sample(logits, rows)


@dataclass
class Answer:
    """Everything that one request gave."""

    logits: dict[int, bytes]  # by position
    tokens: tuple[int, ...]
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt: dict[int, TokenLogprobs] = field(default_factory=dict)  # by position

    def is_beginning_of(self, other: Answer) -> bool:
        return (
            self.tokens == other.tokens[: len(self.tokens)]
            and self.logprobs == other.logprobs[: len(self.logprobs)]
            and self.logits.items() <= other.logits.items()
            and self.prompt.items() <= other.prompt.items()
        )


def run(
    model: LoadedModel, requests: list[Request], *, num_blocks: int, caching: bool, **limits: int
) -> tuple[list[Answer], Engine]:
    """One fresh engine; every invariant is checked after every step."""
    scheduler = SchedulerSettings(**limits)
    kv_cache = KvCacheManager(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=caching,
    )
    plan = KvCachePlan(num_blocks, BLOCK_SIZE, 0, num_blocks * BLOCK_SIZE, MAX_MODEL_LEN)
    sampler = Recording()
    runner = ModelRunner(model, plan, scheduler, kv_cache.block_tables, sampler)
    engine = Engine(Scheduler(scheduler, kv_cache, MAX_MODEL_LEN), kv_cache, runner)
    sequences = [request.sequence(number) for number, request in enumerate(requests)]
    answers = [Answer({}, ()) for _ in requests]
    for step in itertools.count():
        engine.add(s for s, request in zip(sequences, requests, strict=True) if request.arrives == step)
        for sequence, request in zip(sequences, requests, strict=True):
            if request.cancelled == step:
                engine.cancel(sequence.request_id)
        if not engine.has_work and step >= max(request.arrives for request in requests):
            break
        result = engine.step(0.0)
        assert result.failed == ()
        engine.check_invariants()
        for token in result.sampled:
            answers[token.sequence.seq_id].logprobs.append(token.logprobs)
        for scores in result.prompt_logprobs:
            found = enumerate(scores.logprobs, start=scores.start)
            answers[scores.sequence.seq_id].prompt.update(found)
    for sequence, answer in zip(sequences, answers, strict=True):
        answer.tokens = sequence.output_token_ids()
        answer.logits = {at: row for (seq_id, at), row in sampler.logits.items() if seq_id == sequence.seq_id}
        assert sequence.status is SequenceStatus.FINISHED
        if sequence.finish_reason is not FinishReason.CANCELLED:
            assert len(answer.logits) == len(answer.tokens)
    return answers, engine


@functools.cache
def alone(load: Load, name: str, request: Request) -> Answer:
    """In one chunk, on one thread, without a cache."""
    limits = {"max_num_seqs": 1, "max_num_batched_tokens": 4 * MAX_MODEL_LEN}
    return run(load(name, 1), [request], num_blocks=8, caching=False, **limits)[0][0]


REQUESTS = st.builds(
    Request,
    family=st.integers(0, 1),
    length=st.integers(1, 110),
    max_tokens=st.integers(1, 10),
    way=st.integers(0, len(WAYS) - 1),
    scores=st.sampled_from([False, False, False, True]),
    arrives=st.integers(0, 12),
    cancelled=st.none() | st.none() | st.integers(13, 25),
    priority=st.sampled_from([0, 0, 1]),
)
LIMITS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(6, 14),  # one request of the full length takes 6
        "caching": st.sampled_from([True, True, False]),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(16, 64),
        "max_prefill_tokens_beside_decodes": st.integers(1, 40),
        "long_prefill_token_threshold": st.integers(1, 100),
    }
)


@pytest.mark.parametrize("name", FORMATS)
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(requests=st.lists(REQUESTS, min_size=1, max_size=6), limits=LIMITS, threads=st.sampled_from([1, 1, 1, 2]))
def test_a_request_gives_the_same_bits_in_any_schedule(
    load: Load, name: str, requests: list[Request], limits: dict[str, int], threads: int
) -> None:
    answers, _ = run(load(name, threads), requests, **limits)
    for request, answer in zip(requests, answers, strict=True):
        expected = alone(load, name, request.alone())
        assert answer.is_beginning_of(expected)
        if request.cancelled is None:
            assert answer == expected


@pytest.mark.parametrize("name", FORMATS)
def test_preemption_and_cache_hits_are_really_met(load: Load, name: str) -> None:
    requests = [Request(0, 100, 90, way, scores=False, arrives=2 * way) for way in range(len(WAYS))]
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 40, "max_prefill_tokens_beside_decodes": 30}
    expected = [alone(load, name, request.alone()) for request in requests]
    for threads, caching in ((2, True), (1, False)):
        answers, engine = run(load(name, threads), requests, num_blocks=9, caching=caching, **limits)
        assert answers == expected
        stats = engine.stats()
        assert stats.preemptions > 0
        assert (stats.prefix_cache_hits > 0) == caching
