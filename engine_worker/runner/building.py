"""The two ways to compute a model: our own decoder, or transformers' modelling code over our paged attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import structlog
import torch

from common.errors import ConfigError, NotEnoughMemory, UnsupportedModel
from engine_worker.config import ComputeSettings, ModelSettings
from engine_worker.kernels.ops_torch import TorchOps
from engine_worker.models.config import DecoderConfig, parse_config
from engine_worker.models.hf import HfModel, build_hf_decoder, load_model, transformers_version
from engine_worker.models.registry import Decoder, ModelShape, build_decoder, model_length, weight_bytes
from engine_worker.runner.backend import Backend, Quantization, choose_backend
from engine_worker.weights.checkpoint import Checkpoint, FormattedWeights
from engine_worker.weights.memory import available_bytes, human
from engine_worker.weights.model_files import ModelFiles

log = structlog.get_logger(__name__)

ModelImpl = Literal["native", "transformers"]


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A decoder whose weights are in memory."""

    decoder: Decoder
    shape: ModelShape
    backend: Backend
    quantization: Quantization
    max_model_len: int
    weight_bytes: int  # estimated
    num_params: int
    numerics: tuple[Any, ...]  # what, besides weights and backend, decides logits


def native_config(model: ModelSettings, files: ModelFiles) -> DecoderConfig | None:
    """The model as our own decoder takes it, or None where transformers is to compute it.

    Raises `UnsupportedModel` when our own decoder refuses it and nothing else may.
    """
    if model.model_impl == "transformers":
        if files.directory is None:
            raise UnsupportedModel(
                "model_impl transformers needs a model directory with safetensors", param="model_impl"
            )
        return None
    try:
        return parse_config(files.config)
    except UnsupportedModel as error:
        if model.model_impl == "native" or files.directory is None:
            raise
        log.info("model_impl", chosen="transformers", reason=error.message)
        return None


def build_native(
    model: ModelSettings, compute: ComputeSettings, files: ModelFiles, config: DecoderConfig
) -> BuiltModel:
    """Our own decoder. Raises as `loading.load_engine_model` does."""
    max_model_len = model_length(config, model.max_model_len)
    backend = choose_backend(compute, model.dtype, config, model.kv_cache_dtype)
    quantization = _quantization(model, files.checkpoint)
    keeps_groups = backend.name == "native" and backend.dtype is torch.bfloat16
    num_bytes = weight_bytes(config, quantization if keeps_groups else "none", backend.dtype)
    _check_memory(num_bytes, backend.device)
    num_params = weight_bytes(config, "none", torch.bfloat16) // 2
    numerics = _numerics(backend)
    weights = FormattedWeights(files.checkpoint, model.quantization)
    try:
        decoder = build_decoder(config, backend.ops, weights, max_model_len, backend.device)
    except ValueError as error:
        raise UnsupportedModel(f"the {backend.name} backend cannot serve this model: {error}") from error
    return BuiltModel(decoder, config, backend, quantization, max_model_len, num_bytes, num_params, numerics)


def _numerics(backend: Backend) -> tuple[str, ...]:
    """Beside the dtype. What came first has no name here, so that fingerprints stay what they were."""
    parts = (
        ("fixed order", backend.name == "triton" and backend.is_batch_invariant),
        ("avx2", backend.target == "avx2"),
        ("kv int8", backend.kv_format == "int8"),
    )
    return tuple(name for name, holds in parts if holds)


def build_transformers(model: ModelSettings, compute: ComputeSettings, files: ModelFiles) -> BuiltModel:
    """transformers' modelling code. Raises as `loading.load_engine_model` does."""
    assert files.directory is not None, "see native_config"
    if compute.deterministic:
        raise ConfigError(
            "deterministic: of a model that transformers computes some operations stay torch's, and these do not "
            "promise the same logits in any batch",
            param="deterministic",
        )
    if model.kv_cache_dtype == "int8":
        raise ConfigError(
            "kv_cache_dtype int8 cannot be used: transformers computes this model, over keys and values in the model's "
            "dtype; use auto",
            param="kv_cache_dtype",
        )
    backend = choose_backend(compute, model.dtype, None, model.kv_cache_dtype)
    num_bytes = _stored_bytes(files, backend.dtype)
    _check_memory(num_bytes, backend.device)
    loaded = load_model(files.directory, backend.dtype, backend.device, model.max_model_len)
    backend = _serving(backend, compute, loaded)
    quantization: Quantization = "none" if model.quantization == "auto" else model.quantization
    decoder = build_hf_decoder(loaded, backend.ops, backend.device, quantization)
    return BuiltModel(
        decoder=decoder,
        shape=loaded.config,
        backend=backend,
        quantization=quantization,
        max_model_len=loaded.max_model_len,
        weight_bytes=num_bytes,
        num_params=num_bytes // backend.dtype.itemsize,
        numerics=("transformers", transformers_version(), *_numerics(backend)),
    )


def _serving(backend: Backend, compute: ComputeSettings, loaded: HfModel) -> Backend:
    """``backend``, or plain torch where it cannot hold this model's keys and values. Raises `ConfigError`."""
    shape = loaded.config
    try:
        backend.ops.kv_bytes_per_block(shape.num_layers, 32, shape.num_kv_heads, shape.head_size)
    except ValueError as error:
        if compute.backend == backend.name:
            raise ConfigError(f"backend {backend.name} cannot be used: {error}", param="backend") from error
        log.warning("own_kernels_unavailable", backend=backend.name, reason=str(error), instead="torch")
        return replace(backend, name="torch", ops=TorchOps(backend.dtype, backend.device), target=None)
    return backend


def _stored_bytes(files: ModelFiles, dtype: torch.dtype) -> int:
    """Of the weights in ``dtype``, by the size of the files."""
    stored = str(files.config.get("dtype") or files.config.get("torch_dtype") or "bfloat16")
    stored_itemsize = 4 if stored == "float32" else 2
    return sum(path.stat().st_size for path in files.checkpoint.paths) * dtype.itemsize // stored_itemsize


def _quantization(model: ModelSettings, checkpoint: Checkpoint) -> Quantization:
    """What the model is called: with "auto", by how the file holds the largest matrix of the first layer."""
    if model.quantization != "auto":
        return model.quantization
    for name in ("mlp.gate_up_proj", "mlp.gate_proj"):
        if checkpoint.has(f"model.layers.0.{name}.weight"):
            return checkpoint.stored_format(f"model.layers.0.{name}.weight")
    return "none"


def _check_memory(needed: int, device: torch.device) -> None:
    """Raises `NotEnoughMemory` when the machine has less than ``needed`` bytes."""
    if device.type != "cpu":
        return
    free = available_bytes()
    if needed > free:
        raise NotEnoughMemory(
            f"the weights take about {human(needed)}, but only {human(free)} of memory are free: choose a smaller "
            f"model or a smaller quantization",
            param="model",
        )
