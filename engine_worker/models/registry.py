"""Which decoder serves which architecture, how long its sequences may get and how much memory it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from common.errors import ConfigError, UnsupportedModel
from engine_worker.kernels.ops import AttentionMetadata, KvCache, Ops
from engine_worker.models.config import FAMILIES, DecoderConfig
from engine_worker.models.layers import WeightSource
from engine_worker.models.llama import LlamaDecoder

_BYTES_PER_WEIGHT: Final = {"int8": 34 / 32, "int4": 20 / 32}  # values and the scales of their groups
_STRETCHABLE: Final = ("linear", "dynamic", "yarn")
MAX_POSITIONS: Final = 1 << 24  # as long as max_model_len may be


class ModelShape(Protocol):
    """What the cache and the sampler have to know of a model, however it is computed."""

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...


class Decoder(Protocol):
    """A decoder-only model over a flat batch of tokens."""

    def hidden(self, token_ids: Tensor, cache: KvCache, meta: AttentionMetadata) -> Tensor:
        """int32/int64 [T] -> fp32 [T, D], what `logits` takes; writes K and V of all T tokens."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, D], rows of `hidden` -> fp32 [R, V], contiguous."""
        ...


_DECODERS: Final[Mapping[str, type[LlamaDecoder]]] = dict.fromkeys(FAMILIES, LlamaDecoder)


def build_decoder(
    config: DecoderConfig, ops: Ops, weights: WeightSource, num_positions: int, device: torch.device
) -> Decoder:
    """Read, convert and pack all weights. ``num_positions``: of the longest sequence that is served.

    Raises `CheckpointMismatch`, `UnsupportedModel`, and ValueError where ``ops`` cannot serve a shape.
    """
    return _DECODERS[config.architecture](config, ops, weights, num_positions, device)


def model_length(config: DecoderConfig, asked: int) -> int:
    """Longest sequence to serve: ``asked``, or the model's own context length when that is 0.

    Raises `ConfigError` when the model's positions do not reach so far, or without end.
    """
    rope = config.rope
    stretched = int(rope.original_positions * rope.factor) if rope.kind in _STRETCHABLE else config.max_positions
    limit = max(config.max_positions, stretched)
    # A file that names its original length means it: linear and dynamic scaling are often given on top of a context
    # length that includes them already.
    own = limit if "original_max_position_embeddings" in rope.parameters else config.max_positions
    if asked > limit:
        raise ConfigError(
            f"max_model_len is {asked}, but the model's positions reach to {limit}: lower max_model_len",
            param="max_model_len",
        )
    if not asked and own > MAX_POSITIONS:
        raise UnsupportedModel(
            f"the model names {own} positions, more than anybody has memory for: give max_model_len",
            param="max_model_len",
        )
    return asked or own


def weight_bytes(config: DecoderConfig, quantization: Literal["none", "int8", "int4"], dtype: torch.dtype) -> int:
    """Memory that the packed weights will take, estimated from the shapes alone."""
    hidden = config.hidden_size
    attention = hidden * (config.qkv_size + config.num_heads * config.head_size)
    layers = config.num_layers * (attention + 3 * hidden * config.intermediate_size)
    table = config.vocab_size * hidden
    dense = dtype.itemsize
    of_layer = _BYTES_PER_WEIGHT.get(quantization, dense)
    of_head = _BYTES_PER_WEIGHT["int8"] if quantization != "none" else dense
    return int(layers * of_layer + table * (of_head + min(2, dense)))
