"""Steps over a small model: transformers' own answers, scores of prompts, failures that stay with their sequence."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from engine_worker.kernels.build import BuildSettings as KernelBuild
from engine_worker.kernels.build import KernelsUnavailable, build
from engine_worker.runner.loading import LoadedModel
from tests.unit.engine_worker.models.tiny_models import VOCAB_SIZE, make_model, reference_logits
from tests.unit.engine_worker.runner.small_world import SmallWorld, load


def _prompt(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(3, VOCAB_SIZE) for _ in range(length)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("qwen3")
    return directory, make_model("qwen3", directory)


@pytest.fixture(params=["torch", "native"])
def model(request: pytest.FixtureRequest, saved: tuple[Path, Any]) -> LoadedModel:
    if request.param == "native":
        _need_native()
    return load(saved[0], request.param)


def _need_native() -> None:
    try:
        build(KernelBuild())
    except KernelsUnavailable as error:
        pytest.skip(str(error))


def _greedy(reference: Any, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(reference_logits(reference, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_answers_equal_transformers_whatever_shares_the_step(model: LoadedModel, saved: tuple[Path, Any]) -> None:
    world = SmallWorld(model)
    prompts = [_prompt(length, length) for length in (1, 5, 31, 32, 33, 90, 150)]
    sequences = [world.sequence(prompt) for prompt in prompts]
    world.run(*sequences)
    assert any(step.prefill_chunks for step in world.steps)  # the long prompts came in pieces
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert list(sequence.output_token_ids()) == _greedy(saved[1], prompt, 12)


def test_a_cached_prefix_changes_nothing(model: LoadedModel) -> None:
    world = SmallWorld(model)
    prompt = _prompt(100, 5)
    first = world.sequence(prompt)
    world.run(first)
    again, other = world.sequence(prompt), world.sequence([*prompt[:70], *_prompt(20, 6)])
    world.run(again, other)
    assert (again.num_cached_tokens, other.num_cached_tokens) == (96, 64)
    assert again.output_token_ids() == first.output_token_ids()


@pytest.mark.parametrize("num_batched_tokens", [16, 64])
def test_scores_of_a_prompt_equal_transformers(
    model: LoadedModel, saved: tuple[Path, Any], num_batched_tokens: int
) -> None:
    world = SmallWorld(model, num_batched_tokens=num_batched_tokens)
    prompt = _prompt(100, 8)
    scored, beside = world.sequence(prompt, prompt_logprobs=2), world.sequence(_prompt(40, 9))
    world.run(scored, beside)
    scores = [score for step in world.steps for part in step.prompt_logprobs for score in part.logprobs]
    logprobs = reference_logits(saved[1], prompt).log_softmax(-1)
    assert len(scores) == len(prompt) - 1
    for position, score in enumerate(scores, start=1):
        row = logprobs[position - 1]
        assert score.logprob == pytest.approx(float(row[prompt[position]]), abs=1e-3)
        assert score.top_logprobs == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)


def test_tokens_that_the_model_does_not_have_fail_their_sequence_alone(model: LoadedModel) -> None:
    world = SmallWorld(model)
    good = world.sequence(_prompt(20, 1))
    world.run(good)
    together = SmallWorld(model)
    bad, beside = together.sequence([*_prompt(9, 2), VOCAB_SIZE, 5]), together.sequence(_prompt(20, 1))
    together.run(bad, beside)
    failed = [item for step in together.steps for item in step.failed]
    assert [sequence for sequence, _ in failed] == [bad]
    assert f"vocabulary of {VOCAB_SIZE}" in failed[0][1]
    assert beside.output_token_ids() == good.output_token_ids()


@pytest.fixture(params=["torch", "native"])
def poisoned(request: pytest.FixtureRequest, saved: tuple[Path, Any], tmp_path: Path) -> LoadedModel:
    """The same model, but token 2 is not a number, as weights or an overflow may make it."""
    if request.param == "native":
        _need_native()
    for path in saved[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][2] = float("nan")
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return load(tmp_path, request.param)


def _answer(model: LoadedModel, prompt: list[int]) -> tuple[int, ...]:
    world = SmallWorld(model)
    sequence = world.sequence(prompt)
    world.run(sequence)
    return sequence.output_token_ids()


def test_numbers_that_are_none_fail_their_sequence_alone(poisoned: LoadedModel) -> None:
    world = SmallWorld(poisoned)
    bad, beside = world.sequence([*_prompt(9, 2), 2, 7]), world.sequence(_prompt(20, 1))
    world.run(bad, beside)
    failed = [item for step in world.steps for item in step.failed]
    assert [sequence for sequence, _ in failed] == [bad]
    assert "nan" in failed[0][1]
    assert beside.output_token_ids() == _answer(poisoned, _prompt(20, 1))


def test_a_prompt_fails_in_the_chunk_that_goes_wrong(poisoned: LoadedModel) -> None:
    world = SmallWorld(poisoned, num_batched_tokens=16)
    bad = world.sequence([*_prompt(5, 2), 2, *_prompt(60, 3)], prompt_logprobs=0)
    world.run(bad)
    assert [sequence for sequence, _ in world.steps[0].failed] == [bad]
    assert world.steps[0].prompt_logprobs == ()


def test_who_gets_the_blocks_of_a_failed_sequence_does_not_fail_too(poisoned: LoadedModel) -> None:
    world = SmallWorld(poisoned, cache_blocks=8)
    bad = world.sequence([2, *_prompt(200, 2)])
    world.run(bad)
    assert world.steps[-1].failed
    for length in (5, 40, 100):
        prompt = _prompt(length, length)
        sequence = world.sequence(prompt)
        world.run(sequence)
        assert sequence.output_token_ids() == _answer(poisoned, prompt)


def test_each_part_of_a_step_is_timed(model: LoadedModel) -> None:
    world = SmallWorld(model)
    world.run(world.sequence(_prompt(5, 1), max_tokens=1))
    assert {"prepare", "forward", "sample"} <= world.steps[0].timings_s.keys()
    assert all(seconds >= 0 for seconds in world.steps[0].timings_s.values())


def test_no_gradients_are_kept(model: LoadedModel) -> None:
    world = SmallWorld(model)
    world.run(world.sequence(_prompt(5, 1), max_tokens=2))
    assert not torch.is_inference_mode_enabled()
