"""Rotary position embedding: how the frequencies are scaled, and the table of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from common.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """``parameters``: those of the scaling kind, as config.json has them."""

    kind: str  # default | linear | dynamic | yarn | llama3 | longrope
    theta: float
    rotary_dim: int  # of each head's elements, the first so many are rotated
    max_positions: int
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def original_positions(self) -> int:
        """Context length of the pre-training, before it was stretched."""
        return int(self.parameters.get("original_max_position_embeddings") or self.max_positions)

    @property
    def factor(self) -> float:
        """By how much the context was stretched."""
        given = self.parameters.get("factor")
        return float(given if given is not None else self.max_positions / self.original_positions)


def parse_rope(config: Mapping[str, Any], head_size: int) -> RopeConfig:
    """From config.json in its old form (rope_theta, rope_scaling) and its new one (rope_parameters).

    Raises `UnsupportedModel` for kinds that are not served and for parameters that are missing.
    """
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if config.get("model_type") == "phi3" and kind in ("su", "yarn"):
        kind = "longrope"  # the names under which the first checkpoints knew it
    if kind not in _KINDS:
        raise UnsupportedModel(f"rope type {kind!r} is not served; served: {', '.join(_KINDS)}", param="model")
    if "original_max_position_embeddings" in config:
        parameters.setdefault("original_max_position_embeddings", config["original_max_position_embeddings"])
    missing = [name for name in _REQUIRED.get(kind, ()) if parameters.get(name) is None]
    if missing:
        raise UnsupportedModel(f"rope type {kind!r} needs {', '.join(missing)} in config.json", param="model")
    return RopeConfig(
        kind=kind,
        theta=float(theta),
        rotary_dim=int(head_size * partial),
        max_positions=int(config["max_position_embeddings"]),
        parameters=parameters,
    )


def rope_table(rope: RopeConfig, num_positions: int) -> Tensor:
    """fp32 [num_positions, rotary_dim]: halves cos | sin of each position.

    Scalings that depend on the length of a sequence (dynamic, longrope) are fixed for ``num_positions``, the longest
    sequence that is served: a key in the cache cannot be rotated again when its sequence grows.
    """
    frequencies, magnitude = _KINDS[rope.kind](rope, num_positions)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat([angles.cos() * magnitude, angles.sin() * magnitude], dim=1)


_Scaled = tuple[Tensor, float]  # inverse frequencies fp32 [rotary_dim / 2], factor on cos and sin


def _exponents(rope: RopeConfig) -> Tensor:
    return torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim


def _default(rope: RopeConfig, num_positions: int) -> _Scaled:
    return 1.0 / rope.theta ** _exponents(rope), 1.0


def _linear(rope: RopeConfig, num_positions: int) -> _Scaled:
    return _default(rope, num_positions)[0] / rope.factor, 1.0


def _dynamic(rope: RopeConfig, num_positions: int) -> _Scaled:
    """NTK-aware: the base grows with the length beyond the original context."""
    length, dim = max(num_positions, rope.max_positions), rope.rotary_dim
    stretch = rope.factor * length / rope.max_positions - (rope.factor - 1)
    theta = rope.theta * stretch ** (dim / (dim - 2))
    return 1.0 / theta ** _exponents(rope), 1.0


def _yarn(rope: RopeConfig, num_positions: int) -> _Scaled:
    """High frequencies stay, low ones are interpolated, with a ramp between (arXiv 2309.00071)."""
    given, dim = rope.parameters, rope.rotary_dim

    def dimension(rotations: float) -> float:  # whose wave turns `rotations` times within the original context
        turns = rope.original_positions / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(given.get("beta_fast") or 32), dimension(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (max(high - low, 0.001))
    interpolated = ramp.clamp(0, 1)
    plain = 1.0 / rope.theta ** _exponents(rope)
    return plain / rope.factor * interpolated + plain * (1 - interpolated), _yarn_magnitude(rope)


def _yarn_magnitude(rope: RopeConfig) -> float:
    given = rope.parameters
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return magnitude(given["mscale"]) / magnitude(given["mscale_all_dim"])
    return magnitude(1.0)


def _llama3(rope: RopeConfig, num_positions: int) -> _Scaled:
    """Wave lengths far beyond the original context are stretched, short ones stay, with a ramp between."""
    given = rope.parameters
    low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
    plain = 1.0 / rope.theta ** _exponents(rope)
    turns = rope.original_positions / (2 * math.pi / plain)  # within the original context
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * plain / rope.factor + smooth * plain, 1.0


def _longrope(rope: RopeConfig, num_positions: int) -> _Scaled:
    given, original = rope.parameters, rope.original_positions
    factors = torch.tensor(given["long_factor" if num_positions > original else "short_factor"], dtype=torch.float32)
    magnitude = given.get("attention_factor")
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(rope.factor) / math.log(original)) if rope.factor > 1 else 1.0
    return 1.0 / (factors * rope.theta ** _exponents(rope)), float(magnitude)


_KINDS: Final[Mapping[str, Callable[[RopeConfig, int], _Scaled]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
_REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
