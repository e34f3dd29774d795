"""From settings to a model that can be stepped: files, weights, operators and decoder joined.

Start-up time is a feature: weight files are mapped and each matrix is converted and packed once; the weights' digest
is computed beside that; transformers is never imported.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from common.errors import ModelFileMissing, NotEnoughMemory, UnsupportedModel
from common.model_card import GenerationDefaults
from engine_worker.config import ComputeSettings, ModelSettings
from engine_worker.kernels.ops import Ops
from engine_worker.models.config import DecoderConfig, parse_config
from engine_worker.models.registry import Decoder, build_decoder, model_length, weight_bytes
from engine_worker.runner.backend import Backend, Quantization, choose_backend
from engine_worker.weights.checkpoint import Checkpoint, FormattedWeights
from engine_worker.weights.fingerprint import model_fingerprint, weights_digest
from engine_worker.weights.memory import available_bytes, human
from engine_worker.weights.model_files import ModelFiles, open_model

# Part of the fingerprint: raise it when a change of the kernels or decoders changes logits.
_NUMERICS_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights in memory, ready to step, and everything that the model card says about them."""

    decoder: Decoder
    ops: Ops
    device: torch.device
    config: DecoderConfig
    served_names: tuple[str, ...]  # never empty; the first is the model's name
    fingerprint: str  # SHA-256, hex, over weight files, quantisation, dtype and kernel family
    max_model_len: int
    vocab_size: int  # columns of the logits
    eos_token_ids: tuple[int, ...]
    tokenizer_json: bytes
    tokenizer_config: Mapping[str, Any]
    chat_template: str  # empty = none
    generation_defaults: GenerationDefaults
    architecture: str
    dtype: str  # float32 | bfloat16
    quantization: Quantization
    backend: str  # native | torch
    root: str  # name of where the weights came from
    weight_bytes: int  # estimated from the shapes
    load_s: float


def load_engine_model(model: ModelSettings, compute: ComputeSettings) -> LoadedModel:
    """Load ``model`` for ``compute``. Blocks for as long as the weights take to be read and packed.

    Raises `ModelLoadError` (a `ConfigError`): `ModelFileMissing`, `UnsupportedModel`, `CheckpointMismatch`,
    `NotEnoughMemory`; `ConfigError` when the backend or the length asked for cannot be had.
    """
    started = time.perf_counter()
    files = open_model(model.model, load_format=model.load_format, revision=model.revision)
    config = parse_config(files.config)
    max_model_len = model_length(config, model.max_model_len)
    chat_template = _chat_template(model, files)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-digest") as beside:
        digest = beside.submit(weights_digest, files.checkpoint.paths)
        backend = choose_backend(compute, model.dtype, config)
        quantization = _quantization(model, files.checkpoint)
        num_bytes = _check_memory(config, backend, quantization)
        weights = FormattedWeights(files.checkpoint, model.quantization)
        try:
            decoder = build_decoder(config, backend.ops, weights, max_model_len, backend.device)
        except ValueError as error:
            raise UnsupportedModel(f"the {backend.name} backend cannot serve this model: {error}") from error
        fingerprint = model_fingerprint(
            digest.result(), files.config, quantization, backend.dtype_name, backend.name, _NUMERICS_VERSION
        )
    return LoadedModel(
        decoder=decoder,
        ops=backend.ops,
        device=backend.device,
        config=config,
        served_names=model.served_model_name or (files.name.rsplit("/", 1)[-1],),
        fingerprint=fingerprint,
        max_model_len=max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=_eos_token_ids(files),
        tokenizer_json=files.tokenizer_json,
        tokenizer_config=files.tokenizer_config,
        chat_template=chat_template,
        generation_defaults=_generation_defaults(files.generation_config),
        architecture=config.architecture,
        dtype=backend.dtype_name,
        quantization=quantization,
        backend=backend.name,
        root=files.root,
        weight_bytes=num_bytes,
        load_s=time.perf_counter() - started,
    )


def _quantization(model: ModelSettings, checkpoint: Checkpoint) -> Quantization:
    """What the model is called: with "auto", by how the file holds the largest matrix of the first layer."""
    if model.quantization != "auto":
        return model.quantization
    for name in ("mlp.gate_up_proj", "mlp.gate_proj"):
        if checkpoint.has(f"model.layers.0.{name}.weight"):
            return checkpoint.stored_format(f"model.layers.0.{name}.weight")
    return "none"


def _check_memory(config: DecoderConfig, backend: Backend, quantization: Quantization) -> int:
    """Estimated bytes of the packed weights. Raises `NotEnoughMemory`."""
    keeps_groups = backend.name == "native" and backend.dtype is torch.bfloat16
    needed = weight_bytes(config, quantization if keeps_groups else "none", backend.dtype)
    if backend.device.type == "cpu":
        free = available_bytes()
        if needed > free:
            raise NotEnoughMemory(
                f"the weights take about {human(needed)}, but only {human(free)} of memory are free: choose a smaller "
                f"model or a smaller quantization",
                param="model",
            )
    return needed


def _chat_template(model: ModelSettings, files: ModelFiles) -> str:
    if not model.chat_template:
        return files.chat_template
    try:
        return Path(model.chat_template).read_text(encoding="utf-8")
    except OSError as error:
        raise ModelFileMissing(f"chat_template: {error}", param="chat_template") from error


def _eos_token_ids(files: ModelFiles) -> tuple[int, ...]:
    given = files.generation_config.get("eos_token_id", files.config.get("eos_token_id"))
    ids = given if isinstance(given, list) else [given]
    return tuple(int(i) for i in ids if i is not None)


def _generation_defaults(generation: Mapping[str, Any]) -> GenerationDefaults:
    return GenerationDefaults(
        temperature=generation.get("temperature"),
        top_p=generation.get("top_p"),
        top_k=generation.get("top_k"),
        min_p=generation.get("min_p"),
        repetition_penalty=generation.get("repetition_penalty"),
        max_tokens=generation.get("max_new_tokens"),
    )
