"""Every bound of the sampling fields, and where a default comes from."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.edge.served_models import CONTEXT, byte_tokenizer, served, with_defaults
from tests.unit.edge.translate.calls import chat, completion, refusal, translated_chat

VOCAB = byte_tokenizer().vocab_size

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -0.5}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "NaN"}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"frequency_penalty": 100}, "frequency_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "16"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 129}, "n"),
    ({"n": "2"}, "n"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["", "a"]}, "stop"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": 5}, "stop"),
    ({"stop": ["x" * 2000]}, "stop"),
    ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1}, "allowed_token_ids"),
    ({"logit_bias": {"12345678": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"one": 1, "two": 2}}, "logit_bias"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias[...]"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["  "]}, "bad_words"),
    ({"bad_words": [f"w{i}" for i in range(129)]}, "bad_words"),
    ({"bad_words": [f"w{i}" for i in range(100)]}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": "yes"}, "stream"),
    ({"priority": 2**63}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "a/b"}, "cache_salt"),
    ({"cache_salt": "x" * 129}, "cache_salt"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": CONTEXT + 1}, "truncate_prompt_tokens"),
    ({"truncation_side": "middle"}, "truncation_side"),
    ({"model": 5}, "model"),
]


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_a_value_out_of_bounds_is_refused_by_name(make: Any, fields: dict[str, Any], param: str) -> None:
    error = refusal(make, **fields)
    assert error.param == param
    assert param.split("[")[0] in error.message


CHAT_ONLY: list[tuple[dict[str, Any], str]] = [
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 1000000}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"chat_template": "{{ 'x' * 999999999 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT_ONLY)
def test_a_chat_field_out_of_bounds_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat, **fields).param == param


def test_a_refusal_names_bound_and_value_and_is_bounded() -> None:
    assert refusal(chat, temperature=-0.5).message == "temperature must be in [0, 2], got -0.5"
    assert len(refusal(chat, temperature="x" * 100_000).message) < 400
    assert len(refusal(chat, logit_bias={str(i) * 500: 1.0 for i in range(1000, 2000)}).message) < 400
    assert len(refusal(completion, prompt=[10**4000]).message) < 400


def test_all_wrong_logit_bias_keys_are_listed() -> None:
    assert "['one', 'two']" in refusal(chat, logit_bias={"one": 1, "2": 1, "two": 2}).message


def test_null_is_like_absent() -> None:
    nulls = dict.fromkeys(
        ("temperature", "top_p", "n", "seed", "stop", "max_tokens", "logprobs", "top_logprobs", "tools", "tool_choice",
         "response_format", "stream", "stream_options", "logit_bias", "user", "metadata", "store", "service_tier",
         "parallel_tool_calls", "frequency_penalty", "presence_penalty", "modalities", "audio", "reasoning_effort")
    )  # fmt: skip
    request = chat(**nulls)
    assert (request.sampling.temperature, request.n, request.sampling.logprobs) == (1.0, 1, None)


def test_the_request_wins_over_the_model_and_the_model_over_the_api() -> None:
    model = with_defaults(temperature=0.6, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.1, max_tokens=50)
    given = chat(model, temperature=0.0, top_k=5, repetition_penalty=1.0).sampling
    assert (given.temperature, given.top_k, given.repetition_penalty) == (0.0, 5, 1.0)
    inherited = chat(model).sampling
    assert (inherited.temperature, inherited.top_k, inherited.top_p) == (0.6, 20, 0.9)
    assert (inherited.min_p, inherited.repetition_penalty, inherited.max_tokens) == (0.05, 1.1, 50)
    assert completion().sampling.max_tokens == 16


def test_a_budget_over_the_context_is_clamped() -> None:
    room = CONTEXT - len(chat().prompts[0])
    assert chat(max_tokens=10**12).sampling.max_tokens == room
    assert chat().sampling.max_tokens == room
    assert chat(max_tokens=3, max_completion_tokens=5).sampling.max_tokens == 5


def test_a_small_temperature_is_raised_and_zero_is_greedy() -> None:
    assert chat(temperature=0.001).sampling.temperature == 0.01
    assert chat(temperature=0, n=2, top_p=0.5).sampling.temperature == 0


def test_seeds_are_drawn_when_absent_and_fit_64_bits() -> None:
    assert chat().sampling.seed != chat().sampling.seed
    assert chat(seed=7).sampling.seed == 7
    assert chat(seed=-5).sampling.seed == 2**64 - 5
    assert chat(seed=2**64 - 1).sampling.seed == 2**64 - 1


def test_off_values_of_top_k() -> None:
    assert [chat(top_k=k).sampling.top_k for k in (-1, 0, 3, 10**9)] == [0, 0, 3, 0]


def test_logit_bias_is_clamped() -> None:
    assert chat(logit_bias={"3": 1000, "4": -1000, "5": 0.5}).sampling.logit_bias == {3: 100.0, 4: -100.0, 5: 0.5}


def test_bad_words_are_tried_with_and_without_a_space() -> None:
    encode = byte_tokenizer().encode
    assert set(chat(bad_words=["no"]).sampling.bad_words_token_ids) == {tuple(encode("no")), tuple(encode(" no"))}


def test_everything_else_is_carried_over() -> None:
    request = chat(
        n=3, stop=["a"], stop_token_ids=[3], min_tokens=2, ignore_eos=True, skip_special_tokens=False,
        include_stop_str_in_output=True, allowed_token_ids=[9, 8, 9], cache_salt="s", priority=-4,
        logprobs=True, top_logprobs=2, prompt_logprobs=1,
    )  # fmt: skip
    sampling = request.sampling
    assert (request.n, request.cache_salt, request.priority, request.tenant) == (3, "s", -4, "t")
    assert (request.arrival_s, request.deadline_s, request.trace) == (1000.5, 1600.5, {"traceparent": "00-x"})
    assert (sampling.stop, sampling.stop_token_ids, sampling.eos_token_ids) == (("a",), (3,), (2,))
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.skip_special_tokens) == (2, True, False)
    assert (sampling.allowed_token_ids, sampling.logprobs, sampling.prompt_logprobs) == ((8, 9), 2, 1)
    assert sampling.include_stop_str_in_output
    assert translated_chat(stream=True).stream
    assert chat(served(), model="alias").model == "small"
