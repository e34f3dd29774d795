"""Models that transformers computes: their answers through the engine are those of `generate`, or they are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ConfigError, UnsupportedModel
from engine_worker.kernels.build import KernelsUnavailable
from engine_worker.kernels.cpu import CpuOps
from tests.unit.engine_worker.models.hf_models import (
    REFUSED,
    SERVED,
    VOCAB_SIZE,
    assert_same,
    engine_answers,
    load,
    prompts,
    reference_answers,
    save_model,
    tokenizer_json,
)
from tests.unit.engine_worker.models.tiny_models import make_model

# transformers and what it imports warn of their own futures.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

_FACTORS = {"factor": 2.0, "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize("model_type", SERVED)
def test_answers_equal_those_of_generate(model_type: str, tmp_path: Path) -> None:
    reference = save_model(model_type, SERVED[model_type], tmp_path)
    model = load(tmp_path)
    assert (model.model_impl, model.architecture, model.vocab_size) == ("transformers", model_type, VOCAB_SIZE)
    assert_same(engine_answers(model, prompts(), 12), reference_answers(reference, prompts(), 12))


@pytest.mark.parametrize("model_type", ["gemma3_text", "mixtral", "deepseek_v3", "gpt2"])
def test_native_kernels_give_the_same_answers(model_type: str, tmp_path: Path) -> None:
    try:
        CpuOps("fp32", num_threads=1)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    reference = save_model(model_type, SERVED[model_type], tmp_path)
    model = load(tmp_path, backend="native")
    assert model.backend == "native"
    assert_same(engine_answers(model, prompts(), 12), reference_answers(reference, prompts(), 12))
    in_bfloat16 = load(tmp_path, backend="native", dtype="bfloat16")
    first = [answer.logprobs[0] for answer in engine_answers(in_bfloat16, prompts(), 1)]
    torch.testing.assert_close(first, [a.logprobs[0] for a in engine_answers(model, prompts(), 1)], atol=0.3, rtol=0)


def test_plain_torch_takes_over_where_the_kernels_cannot_hold_the_heads(tmp_path: Path) -> None:
    save_model("qwen3_moe", {**SERVED["qwen3_moe"], "head_dim": 264}, tmp_path)
    assert load(tmp_path, backend="auto").backend == "torch"
    with pytest.raises(ConfigError, match="backend native cannot be used"):
        load(tmp_path, backend="native")


@pytest.mark.parametrize("family", ["llama_3", "gemma2"])
def test_a_family_of_our_own_can_be_computed_by_transformers_too(family: str, tmp_path: Path) -> None:
    make_model(family, tmp_path)
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    ours, theirs = (load(tmp_path, model_impl=path, max_model_len=128) for path in ("auto", "transformers"))
    assert (ours.model_impl, theirs.model_impl) == ("native", "transformers")
    assert ours.fingerprint != theirs.fingerprint
    asked = [[token % 96 for token in prompt] for prompt in prompts()]
    assert_same(engine_answers(ours, asked, 8), engine_answers(theirs, asked, 8))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_linears_are_quantised_on_request(quantization: str, tmp_path: Path) -> None:
    save_model("olmo2", {}, tmp_path)
    model = load(tmp_path, quantization=quantization)
    assert model.quantization == quantization
    assert len(engine_answers(model, prompts(), 4)[0].tokens) == 4


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_our_cache_cannot_carry_is_refused_with_the_reason(model_type: str, tmp_path: Path) -> None:
    changes, reason = REFUSED[model_type]
    save_model(model_type, changes, tmp_path)
    with pytest.raises(UnsupportedModel, match=rf"{model_type} is not served through transformers: .*{reason}"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "t5"}, "encoder and a decoder"),
        ({"model_type": "gemma3"}, "more than text"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ({"model_type": "no-such-model"}, "cannot read config.json"),
        ({"hidden_size": "wide"}, "cannot read config.json: .*'hidden_size' expected int, got str"),
        ({"layer_types": ["half_attention", "full_attention"]}, "cannot read config.json: .*layer_types"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised with gptq"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        (
            {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 64, **_FACTORS}},
            "longrope rotation changes .* set max_model_len to 64 or less",
        ),
    ],
)
def test_a_configuration_is_refused_before_weights_are_read(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save_model("olmo2", {}, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path, max_model_len=128)


def test_missing_weights_are_not_drawn_at_random(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_model("olmo2", {}, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"lacks 1 tensors, such as model\.layers\.1\.mlp\.down_proj"):
        load(tmp_path)


def test_the_native_path_alone_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    save_model("olmo2", {}, tmp_path)
    with pytest.raises(ConfigError, match="'olmo2' is not served"):
        load(tmp_path, model_impl="native")


def test_a_model_that_differs_from_itself_over_the_cache_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that look at their neighbours outside of attention, as convolutions and token shifts do."""
    from transformers.models.olmo2 import modeling_olmo2

    plain = modeling_olmo2.Olmo2MLP.forward

    def shifted(self: Any, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = plain(self, x + x.roll(1, dims=1))
        return mixed

    save_model("olmo2", {}, tmp_path)
    monkeypatch.setattr(modeling_olmo2.Olmo2MLP, "forward", shifted)
    with pytest.raises(UnsupportedModel, match="influence each other"):
        load(tmp_path)
