"""What real clients send by default is accepted; what we cannot honour is refused, or reported as ignored."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import UnsupportedParameter
from tests.unit.edge.translate.calls import COMPAT, chat, translated_chat

HARMLESS: dict[str, Any] = {
    "user": "u-1", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "s",
    "prompt_cache_key": "k", "verbosity": "low", "prediction": {"type": "content", "content": "x"},
    "parallel_tool_calls": False, "modalities": ["text"], "n": 1, "logprobs": False, "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False},
    "use_beam_search": False, "best_of": 1, "request_id": "x", "kv_transfer_params": {}, "echo": False,
    "spaces_between_special_tokens": True, "length_penalty": 1.0, "stream_interval": 1, "add_special_tokens": False,
}  # fmt: skip


def test_harmless_parameters_are_accepted_in_strict_mode() -> None:
    assert translated_chat(**HARMLESS).ignored == ()


@pytest.mark.parametrize(
    "fields",
    [{"favourite_colour": "blue"}, {"use_beam_search": True}, {"kv_transfer_params": {"tp_size": 1}},
     {"modalities": ["audio"]}, {"functions": [{}]}, {"logits_processors": ["x"]}, {"best_of": 2}],
)  # fmt: skip
def test_others_are_refused_by_name_in_strict_mode_and_reported_in_compatible_mode(fields: dict[str, Any]) -> None:
    name = next(iter(fields))
    with pytest.raises(UnsupportedParameter) as caught:
        chat(**fields)
    assert caught.value.param == name
    assert translated_chat(None, COMPAT, **fields).ignored == (name,)


@pytest.mark.parametrize("name", ["guided_json", "guided_choice", "grammar", "thinking_token_budget", "json_schema"])
def test_a_constraint_that_is_not_known_is_never_ignored(name: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        translated_chat(None, COMPAT, **{name: {"x": 1}})
    assert caught.value.param == name


def test_a_long_name_is_cut() -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        chat(**{"x" * 10_000: 1})
    assert len(caught.value.message) < 700
