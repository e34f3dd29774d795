"""From settings to a model that can be stepped: files, weights, operators and decoder joined.

Start-up time is a feature: weight files are mapped and each matrix is converted and packed once; the weights' digest
is computed beside that; transformers is imported only for models that it computes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from common.errors import ModelFileMissing
from common.model_card import GenerationDefaults
from engine_worker.config import ComputeSettings, ModelSettings
from engine_worker.kernels.ops import Ops
from engine_worker.models.registry import Decoder, ModelShape
from engine_worker.runner.backend import Quantization
from engine_worker.runner.building import ModelImpl, build_native, build_transformers, native_config
from engine_worker.weights.fingerprint import model_fingerprint, weights_digest
from engine_worker.weights.model_files import ModelFiles, open_model

# Part of the fingerprint: raise it when a change of the kernels or decoders changes logits.
_NUMERICS_VERSION: Final = 2


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights in memory, ready to step, and everything that the model card says about them."""

    decoder: Decoder
    ops: Ops
    device: torch.device
    config: ModelShape
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
    kv_cache_dtype: str  # float32 | bfloat16 | int8
    quantization: Quantization
    backend: str  # native | triton | torch
    native_target: str  # avx512 | avx2, on the native backend; else empty
    model_impl: ModelImpl
    is_batch_invariant: bool  # a token's logits are the same bits in any batch
    root: str  # name of where the weights came from
    weight_bytes: int  # estimated from the shapes
    num_params: int
    load_s: float


def load_engine_model(model: ModelSettings, compute: ComputeSettings) -> LoadedModel:
    """Load ``model`` for ``compute``. Blocks for as long as the weights take to be read and packed.

    Raises `ModelLoadError` (a `ConfigError`): `ModelFileMissing`, `UnsupportedModel`, `CheckpointMismatch`,
    `NotEnoughMemory`; `ConfigError` when the backend or the length asked for cannot be had.
    """
    started = time.perf_counter()
    files = open_model(model.model, load_format=model.load_format, revision=model.revision)
    config = native_config(model, files)
    chat_template = _chat_template(model, files)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-digest") as beside:
        digest = beside.submit(weights_digest, files.checkpoint.paths)
        if config is None:
            built = build_transformers(model, compute, files)
        else:
            built = build_native(model, compute, files, config)
        backend, shape = built.backend, built.shape
        parts = (files.config, built.quantization, backend.dtype_name, backend.name, _NUMERICS_VERSION)
        fingerprint = model_fingerprint(digest.result(), *parts, *built.numerics)
    return LoadedModel(
        decoder=built.decoder,
        ops=backend.ops,
        device=backend.device,
        config=shape,
        served_names=model.served_model_name or (files.name.rsplit("/", 1)[-1],),
        fingerprint=fingerprint,
        max_model_len=built.max_model_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=_eos_token_ids(files),
        tokenizer_json=files.tokenizer_json,
        tokenizer_config=files.tokenizer_config,
        chat_template=chat_template,
        generation_defaults=_generation_defaults(files.generation_config),
        architecture=shape.architecture,
        dtype=backend.dtype_name,
        kv_cache_dtype=backend.kv_cache_dtype,
        quantization=built.quantization,
        backend=backend.name,
        native_target=backend.target or "",
        model_impl="transformers" if config is None else "native",
        is_batch_invariant=backend.is_batch_invariant and config is not None,
        root=files.root,
        weight_bytes=built.weight_bytes,
        num_params=built.num_params,
        load_s=time.perf_counter() - started,
    )


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
