"""transformers' attention interface, answered from our paged cache.

A model that is loaded under `IMPLEMENTATION` calls two functions registered here: one where it makes its masks, one
in each attention layer. What they do is decided by the `Attending` object of the pass under way: `hf_trace` records
what each layer asks for, `PagedPass` computes it over the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from engine_worker.kernels.ops import AttentionMetadata, AttentionShape, KvCache, Ops

IMPLEMENTATION: Final = "headrace"  # the name under which transformers knows our attention


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a layer hands over. T tokens, flat: the batch is always 1."""

    module: nn.Module
    query: Tensor  # [1, H, T, key size]
    key: Tensor  # [1, KH, T, key size]
    value: Tensor  # [1, KH, T, value size]
    mask: Tensor | None
    scale: float | None
    others: Mapping[str, Any]  # every other argument, by name


class Attending(Protocol):
    """One forward pass, as the attention layers see it."""

    def mask(self, mask_function: Any, num_tokens: int, device: torch.device) -> Tensor | None:
        """What the model hands to its layers as their mask. ``mask_function(batch, head, query, key)``: who sees."""
        ...

    def attend(self, call: AttentionCall) -> Tensor:
        """[1, T, H, value size]."""
        ...


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """An attention layer of a model, and where its keys and values are kept."""

    index: int  # in the cache
    shape: AttentionShape  # its head size is that of the cache: keys and values are padded with zeros to it
    value_size: int


class PagedPass:
    """`Attending` over the paged cache, for one step."""

    def __init__(
        self,
        ops: Ops,
        layers: Mapping[nn.Module, LayerAttention],
        no_rotation: Tensor,
        cache: KvCache,
        meta: AttentionMetadata,
    ) -> None:
        """``no_rotation``: see `no_rotation`; the model has rotated Q and K itself."""
        self._ops = ops
        self._layers = layers
        self._no_rotation = no_rotation
        self._cache = cache
        self._meta = meta

    def mask(self, mask_function: Any, num_tokens: int, device: torch.device) -> Tensor | None:
        return None  # the layers' windows are in their shapes

    def attend(self, call: AttentionCall) -> Tensor:
        layer, ops = self._layers[call.module], self._ops
        shape, num_tokens = layer.shape, call.query.shape[2]
        parts = [_flat(part, shape.head_size) for part in (call.query, call.key, call.value)]
        qkv = torch.cat(parts, dim=1).to(ops.activation_dtype).view(num_tokens, -1)
        ops.rope_write_kv(qkv, self._no_rotation, self._cache, layer.index, self._meta, shape)
        attended = ops.attention(qkv, self._cache, layer.index, self._meta, shape)
        heads = attended.view(1, num_tokens, shape.num_heads, shape.head_size)
        return heads[..., : layer.value_size].to(call.query.dtype)


def no_rotation(num_positions: int, device: torch.device) -> Tensor:
    """fp32 [num_positions, 2]: a table that turns the first pair of elements by nothing, exactly."""
    return torch.tensor([1.0, 0.0], device=device).repeat(num_positions, 1)


@contextmanager
def attending(current: Attending) -> Iterator[None]:
    """Within it, ``current`` answers the attention layers of this thread."""
    token = _current.set(current)
    try:
        yield
    finally:
        _current.reset(token)


@cache
def register() -> None:
    """Make `IMPLEMENTATION` known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, _attend)
    AttentionMaskInterface.register(IMPLEMENTATION, _mask)


_current: ContextVar[Attending] = ContextVar("attending")


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    return _current.get().attend(AttentionCall(module, query, key, value, attention_mask, scaling, others)), None


def _mask(*, mask_function: Any, q_length: int, device: torch.device, **_: Any) -> Tensor | None:
    return _current.get().mask(mask_function, q_length, device)


def _flat(part: Tensor, head_size: int) -> Tensor:
    """[1, heads, T, size] -> [T, heads, head_size], padded with zeros."""
    heads = part[0].transpose(0, 1)
    missing = head_size - heads.shape[-1]
    return nn.functional.pad(heads, (0, missing)) if missing else heads
