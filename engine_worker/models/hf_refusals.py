"""Which models are not served through transformers, as far as their configuration tells."""

from __future__ import annotations

from typing import Any, Final

from common.errors import UnsupportedModel

_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention", "attention", "moe", "dense", "sparse"})
_LENGTH_DEPENDENT_ROPE: Final = ("dynamic", "longrope")


class Refused(UnsupportedModel):
    """Why a model cannot be served through transformers; `refusal` puts the architecture before it."""


def refusal(config: Any, reason: object) -> UnsupportedModel:
    """The error for a model of ``config`` (transformers' own configuration)."""
    return UnsupportedModel(f"{config.model_type} is not served through transformers: {reason}", param="model")


def check_config(config: Any) -> None:
    """Raises `Refused` for what our cache or scheduler cannot carry."""
    if getattr(config, "is_encoder_decoder", False):
        raise Refused("it is an encoder and a decoder, and only decoders are served")
    if config.get_text_config() is not config:
        raise Refused("it takes more than text (a configuration within the configuration), and only text is served")
    if getattr(config, "quantization_config", None):
        method = dict(config.quantization_config).get("quant_method", "unknown")
        raise Refused(f"its checkpoint is quantised with {method}; served are dense safetensors and GGUF")
    if getattr(config, "alibi", False) is True:
        raise Refused("its positions are ALiBi biases, which our attention does not add")
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    if unknown:
        raise Refused(f"it has layers of type {', '.join(unknown)}; served are full and sliding-window attention")


def check_class(model_class: type) -> None:
    """Raises `Refused` by what the model's class says of itself."""
    if getattr(model_class, "_is_stateful", False):
        raise Refused("it is recurrent or a hybrid: its state cannot be kept in a paged KV cache")


def model_length(config: Any, asked: int) -> int:
    """Longest sequence to serve: ``asked``, or the model's own context length when that is 0. Raises `Refused`."""
    own = int(getattr(config, "max_position_embeddings", None) or 0)
    if not own and not asked:
        raise Refused("its configuration names no context length: give max_model_len")
    if own and asked > own:
        raise Refused(f"max_model_len is {asked}, but the model's positions reach to {own}: lower max_model_len")
    length = asked or own
    for parameters in _rope_parameters(config):
        original = parameters.get("original_max_position_embeddings") or own
        kind = parameters.get("rope_type")
        if kind in _LENGTH_DEPENDENT_ROPE and original and length > original:
            raise Refused(
                f"its {kind} rotation changes when a sequence grows beyond {original} positions, but cached keys stay "
                f"as they are: set max_model_len to {original} or less"
            )
    return length


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Those of all layers, or of each type of layers."""
    given = getattr(config, "rope_parameters", None)
    if not isinstance(given, dict):
        return []
    nested = [value for value in given.values() if isinstance(value, dict)]
    original = getattr(config, "original_max_position_embeddings", None)
    common = {"original_max_position_embeddings": original} if original else {}
    return [{**common, **parameters} for parameters in (nested or [given])]
