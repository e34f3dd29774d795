"""Frequencies of each scaling kind equal those that transformers computes; parameters are parsed in both spellings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.errors import UnsupportedModel
from engine_worker.models.rope import parse_rope, rope_table

_SHORT, _LONG = [1.0 + 0.1 * i for i in range(8)], [2.0 + 0.5 * i for i in range(8)]
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 16,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "original_max_position_embeddings": 512,
        "short_factor": _SHORT,
        "long_factor": _LONG,
    },
}


def _config(parameters: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_theta": 5000.0, **parameters},
        **changes,
    }


def _reference(parameters: dict[str, Any], num_positions: int) -> torch.Tensor:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=2,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 5000.0, **parameters},
    )
    if parameters["rope_type"] == "default":
        frequencies, magnitude = 1.0 / 5000.0 ** (torch.arange(0, 16, 2).float() / 16), 1.0
    else:
        compute = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        frequencies, magnitude = compute(config, torch.device("cpu"), seq_len=num_positions)
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    return torch.cat([angles.cos() * magnitude, angles.sin() * magnitude], 1)


@pytest.mark.parametrize("num_positions", [300, 3000])
@pytest.mark.parametrize("kind", KINDS)
def test_the_table_equals_transformers(kind: str, num_positions: int) -> None:
    rope = parse_rope(_config(KINDS[kind]), 16)
    table = rope_table(rope, num_positions)
    assert table.shape == (num_positions, 16)
    torch.testing.assert_close(table, _reference(KINDS[kind], num_positions), atol=3e-4, rtol=0)


def test_the_old_spelling_gives_the_same() -> None:
    new = parse_rope(_config(KINDS["llama3"]), 16)
    scaling = {("type" if key == "rope_type" else key): value for key, value in KINDS["llama3"].items()}
    old = parse_rope(_config({}, rope_parameters=None, rope_theta=5000.0, rope_scaling=scaling), 16)
    torch.testing.assert_close(rope_table(old, 100), rope_table(new, 100), atol=0, rtol=0)


def test_only_a_part_of_each_head_is_rotated() -> None:
    assert parse_rope(_config({"rope_type": "default", "partial_rotary_factor": 0.25}), 64).rotary_dim == 16


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "spiral"}, "spiral"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq"),
    ],
)
def test_what_is_not_served_is_named(parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        parse_rope(_config(parameters), 16)
