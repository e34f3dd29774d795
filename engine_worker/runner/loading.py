"""From settings to a model that can be stepped: files, weights, operators and decoder joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.model_card import GenerationDefaults
from engine_worker.config import ComputeSettings, ModelSettings
from engine_worker.kernels.ops import Ops
from engine_worker.models.config import DecoderConfig
from engine_worker.models.registry import Decoder


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights in memory, ready to step, and everything that the model card says about them."""

    decoder: Decoder
    ops: Ops
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
    quantization: str  # none | int8 | int4
    backend: str  # native | torch
    root: str  # name of where the weights came from
    weight_bytes: int
    load_s: float


def load_engine_model(model: ModelSettings, compute: ComputeSettings) -> LoadedModel:
    """Load ``model`` for ``compute``. Blocks for as long as the weights take to be read and packed.

    Raises `ModelLoadError` (a `ConfigError`): `ModelFileMissing`, `UnsupportedModel`, `CheckpointMismatch`,
    `NotEnoughMemory`.
    """
    raise NotImplementedError
