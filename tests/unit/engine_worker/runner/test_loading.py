"""Loading: what a model is called, in which format it is held, and every way in which it cannot be loaded."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import CheckpointMismatch, ConfigError, ModelFileMissing, NotEnoughMemory, UnsupportedModel
from engine_worker.config import ComputeSettings, ModelSettings
from engine_worker.kernels.build import BuildSettings, KernelsUnavailable, TargetName, build
from engine_worker.runner import building
from engine_worker.runner.loading import load_engine_model
from engine_worker.weights.model_import import import_model
from tests.unit.engine_worker.kernels.native import available_targets, each_target
from tests.unit.engine_worker.models.tiny_models import make_model
from tests.unit.engine_worker.runner.small_world import SmallWorld, load
from tests.unit.engine_worker.weights.tiny_gguf import TOKENS, llama_metadata, llama_tensors, write_gguf


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-llama"
    make_model("llama_3", directory)
    return directory


@pytest.fixture
def changed(directory: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model with other values in config.json."""

    def change(**values: Any) -> Path:
        for path in directory.iterdir():
            if path.name != "config.json":
                (tmp_path / path.name).symlink_to(path)
        config = json.loads((directory / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **values}))
        return tmp_path

    return change


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny-Q4_1.gguf", tensors=llama_tensors("Q4_1"), metadata=llama_metadata())


def test_what_the_model_card_needs(directory: Path) -> None:
    model = load(directory)
    assert model.served_names == ("tiny-llama",)
    assert model.root == "tiny-llama"  # a name, never a path
    assert (model.architecture, model.dtype, model.quantization, model.backend) == ("llama", "float32", "none", "torch")
    assert (model.max_model_len, model.vocab_size, model.eos_token_ids) == (256, 96, (2,))
    assert model.tokenizer_json == b"{}"
    assert model.chat_template == ""


def test_names_length_and_template_asked_for(directory: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("mine")
    model = load(directory, served_model_name=("a", "b"), max_model_len=64, chat_template=str(template))
    assert (model.served_names, model.max_model_len, model.chat_template) == (("a", "b"), 64, "mine")
    with pytest.raises(ModelFileMissing, match=r"chat_template.*none\.jinja"):
        load(directory, chat_template=str(tmp_path / "none.jinja"))


def test_the_fingerprint_follows_whatever_changes_logits(directory: Path, changed: Callable[..., Path]) -> None:
    plain = load(directory).fingerprint
    assert load(directory).fingerprint == plain
    others = [
        load(directory, dtype="bfloat16").fingerprint,
        load(directory, quantization="int8").fingerprint,
        load(directory, kv_cache_dtype="int8").fingerprint,
        load(changed(rms_norm_eps=1e-3)).fingerprint,
    ]
    assert len({plain, *others}) == 5


def test_keys_and_values_are_in_the_model_s_dtype_unless_asked_for(directory: Path) -> None:
    assert load(directory).kv_cache_dtype == "float32"
    assert load(directory, dtype="bfloat16").kv_cache_dtype == "bfloat16"
    assert load(directory, dtype="bfloat16", kv_cache_dtype="bfloat16").kv_cache_dtype == "bfloat16"
    assert load(directory, dtype="bfloat16", kv_cache_dtype="int8").kv_cache_dtype == "int8"
    assert load(directory, kv_cache_dtype="int8").kv_cache_dtype == "int8"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, "the model is computed in float32"),
        ({"model_impl": "transformers", "kv_cache_dtype": "int8"}, "transformers computes this model"),
    ],
)
def test_a_format_of_keys_and_values_that_cannot_be_had_is_an_error_that_names_it(
    directory: Path, settings: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype .* cannot be used: .*{reason}") as raised:
        load(directory, **settings)
    assert raised.value.param == "kv_cache_dtype"


def test_triton_refuses_int8_keys_and_values(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("engine_worker.kernels.gpu.launch.is_usable", lambda: True)
    with pytest.raises(ConfigError, match="kv_cache_dtype int8 cannot be used: the triton kernels") as raised:
        load(directory, backend="triton", kv_cache_dtype="int8")
    assert raised.value.param == "kv_cache_dtype"


@each_target
def test_the_target_of_the_native_kernels_is_told_and_in_the_fingerprint(directory: Path, target: TargetName) -> None:
    compute = ComputeSettings(backend="native", num_threads=1, native_target=target)
    model = load_engine_model(ModelSettings(model=str(directory)), compute)
    assert (model.backend, model.native_target) == ("native", target)
    others = [t for t in available_targets() if t != target]
    for other in others:
        compute = compute.model_copy(update={"native_target": other})
        assert load_engine_model(ModelSettings(model=str(directory)), compute).fingerprint != model.fingerprint


def test_a_target_that_is_asked_for_and_cannot_be_had_is_an_error(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text("flags : avx2 fma f16c\n")
    little = functools.partial(BuildSettings, cpuinfo=tmp_path / "cpuinfo")
    monkeypatch.setattr("engine_worker.runner.backend.BuildSettings", little)
    with pytest.raises(ConfigError, match="avx512_vnni"):
        load_engine_model(
            ModelSettings(model=str(directory)), ComputeSettings(backend="native", native_target="avx512")
        )


def test_several_ends_and_defaults_of_generation(changed: Callable[..., Path]) -> None:
    directory = changed()
    generation = {"eos_token_id": [2, 7], "temperature": 0.6, "top_k": 20, "max_new_tokens": 99}
    (directory / "generation_config.json").unlink()
    (directory / "generation_config.json").write_text(json.dumps(generation))
    model = load(directory)
    assert model.eos_token_ids == (2, 7)
    defaults = model.generation_defaults
    assert (defaults.temperature, defaults.top_k, defaults.max_tokens, defaults.top_p) == (0.6, 20, 99, None)


def _logits(path: Path, **settings: Any) -> list[int]:
    world = SmallWorld(load(path, **settings))
    sequence = world.sequence([5, 9, 3, 8, 4, 7], max_tokens=16)
    world.run(sequence)
    return list(sequence.output_token_ids())


def test_a_gguf_file_is_held_as_it_is_or_as_asked_for(gguf_file: Path) -> None:
    model = load(gguf_file, dtype="auto", quantization="auto")
    assert (model.quantization, model.vocab_size) == ("int4", len(TOKENS))
    assert model.served_names == ("tiny-Q4_1",)
    assert load(gguf_file, quantization="none").quantization == "none"
    # In fp32 the file's four-bit numbers are computed with exactly, packed or dequantised.
    assert _logits(gguf_file, quantization="auto") == _logits(gguf_file, quantization="none")


def test_the_demo_is_served_under_the_name_asked_for_with_the_fingerprint_of_its_import(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_worker.weights.hub.find_demo_gguf", lambda: gguf_file)
    imported = load(import_model("demo", tmp_path / "imported"))
    monkeypatch.chdir(tmp_path)
    demo = load(Path("demo"))
    assert demo.served_names == ("demo",)
    assert demo.fingerprint == imported.fingerprint, "workers of either take over from each other"


def test_native_and_torch_agree_on_quantised_weights(gguf_file: Path) -> None:
    try:
        build(BuildSettings())
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    assert _logits(gguf_file, backend="native") == _logits(gguf_file, backend="torch")
    assert load(gguf_file, backend="native", dtype="auto").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"model": "./nowhere"}, ModelFileMissing, "nowhere"),
        ({"max_model_len": 9999}, ConfigError, "max_model_len is 9999"),
    ],
)
def test_settings_that_cannot_be_met(directory: Path, settings: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        load_engine_model(ModelSettings(**{"model": str(directory), **settings}), ComputeSettings(backend="torch"))


@pytest.mark.parametrize("device", ["toaster", "cuda:99"])
def test_a_device_that_does_not_exist(directory: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"device: '{device}' cannot be used"):
        load_engine_model(ModelSettings(model=str(directory)), ComputeSettings(device=device))


def test_a_shape_other_than_the_configuration_says(changed: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointMismatch, match=r"mlp\.\w+.*\[96, 64\].*\[128, 64\]"):
        load(changed(intermediate_size=128))


def test_a_missing_layer(changed: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointMismatch, match=r"layers\.3\..* is missing"):
        load(changed(num_hidden_layers=4))


def test_an_architecture_that_nobody_serves(changed: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedModel, match="abacus"):
        load(changed(model_type="abacus"))


def test_too_little_memory_is_said_before_anything_is_loaded(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "available_bytes", lambda: 1000)
    monkeypatch.setattr(torch, "cat", None)  # nothing may be read
    with pytest.raises(NotEnoughMemory, match="only 1000 B of memory are free"):
        load(directory)
