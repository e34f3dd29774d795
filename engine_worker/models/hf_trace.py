"""What each attention layer of a model asks for, found by watching one forward pass; refused where we cannot do it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from engine_worker.kernels.ops import AttentionShape
from engine_worker.models.hf_attention import AttentionCall, LayerAttention
from engine_worker.models.hf_refusals import Refused

# Arguments of the attention interface that say nothing our attention does not know anyhow.
_HARMLESS: Final = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states", "return_dict"}
    | {"past_key_values", "past_key_value", "dropout", "is_causal", "output_router_logits", "logits_to_keep"}
    | {"token_type_ids", "layer_idx"}
)
_MASK_ROWS: Final = 64  # queries at the beginning that a mask is looked at for, besides some later ones


@dataclass(frozen=True, slots=True)
class TracedAttention:
    """All attention layers of a model, in the order in which they are computed."""

    layers: Mapping[nn.Module, LayerAttention]
    num_kv_heads: int
    head_size: int  # of the cache


class Tracing:
    """`Attending` that records. The values it hands back are zeros: only shapes and arguments matter here."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._windows: dict[int, int | None] = {}  # by the storage of the mask that stands for it
        self._masks: list[Tensor] = []  # kept alive, so that no storage is used twice
        self._found: dict[nn.Module, LayerAttention] = {}

    def mask(self, mask_function: Any, num_tokens: int, device: torch.device) -> Tensor | None:
        window = window_of(mask_function, self._max_model_len, device)
        mask = torch.zeros(1, 1, num_tokens, num_tokens, dtype=torch.bool, device=device)
        self._masks.append(mask)
        self._windows[mask.untyped_storage().data_ptr()] = window
        return mask

    def attend(self, call: AttentionCall) -> Tensor:
        if call.module in self._found:
            raise Refused("one attention layer is computed twice in a pass, which needs two places in the cache")
        if call.query.shape[0] != 1 or call.query.shape[2] != call.key.shape[2]:
            raise Refused("a layer attends over other tokens than those of the step")
        if not getattr(call.module, "is_causal", True) or call.others.get("is_causal") is False:
            raise Refused("its attention is not causal")
        _refuse_extras(call)
        _, num_heads, num_tokens, key_size = call.query.shape
        value_size = call.value.shape[-1]
        shape = AttentionShape(
            num_heads=num_heads,
            num_kv_heads=call.key.shape[1],
            head_size=max(key_size, value_size),
            scale=float(key_size**-0.5 if call.scale is None else call.scale),
            sliding_window=self._window(call),
            soft_cap=call.others.get("softcap"),
        )
        self._found[call.module] = LayerAttention(len(self._found), shape, value_size)
        return call.query.new_zeros(1, num_tokens, num_heads, value_size)

    def traced(self, num_layers: int) -> TracedAttention:
        """Raises `Refused` unless each of ``num_layers`` layers was seen, and all can share one cache."""
        layers = self._found
        if len(layers) != num_layers:
            raise Refused(
                f"only {len(layers)} of its {num_layers} layers attend through transformers' attention interface: "
                f"the others keep a state of their own, or compute attention themselves (as with ALiBi)"
            )
        kv_heads = {layer.shape.num_kv_heads for layer in layers.values()}
        if len(kv_heads) > 1:
            raise Refused(f"its layers differ in their number of KV heads: {sorted(kv_heads)}")
        head_size = max(layer.shape.head_size for layer in layers.values())
        padded = {
            module: replace(layer, shape=replace(layer.shape, head_size=head_size)) for module, layer in layers.items()
        }
        return TracedAttention(padded, kv_heads.pop(), head_size)

    def _window(self, call: AttentionCall) -> int | None:
        if call.mask is None:
            if call.others.get("sliding_window") is not None:
                raise Refused("a layer has a sliding window but no mask that says which")
            return None
        storage = call.mask.untyped_storage().data_ptr()
        if storage not in self._windows:
            raise Refused("it changes the attention mask by rules of its own")
        return self._windows[storage]


def window_of(mask_function: Any, num_positions: int, device: torch.device) -> int | None:
    """The sliding window that ``mask_function`` describes for sequences of ``num_positions``; None = full attention.

    Raises `Refused` when it is neither: chunks, prefixes seen from everywhere, masks that depend on the tokens.
    """
    last = num_positions - 1
    try:
        num_seen = int(_seen(mask_function, [last], num_positions, device).sum())
        later = [num_seen - 1, num_seen, num_seen + 1, last // 3, last // 2, last - 1, last]
        queries = sorted({q for q in [*range(_MASK_ROWS), *later] if 0 <= q <= last})
        seen = _seen(mask_function, queries, num_positions, device)
    except (IndexError, RuntimeError) as error:
        raise Refused(f"its attention mask depends on the tokens ({error})") from error
    q, k = torch.tensor(queries, device=device)[:, None], torch.arange(num_positions, device=device)
    if not torch.equal(seen, (k <= q) & (k > q - num_seen)):
        raise Refused("its attention mask is neither causal nor a causal sliding window")
    return None if num_seen == num_positions else num_seen


def _seen(mask_function: Any, queries: list[int], num_positions: int, device: torch.device) -> Tensor:
    """bool [queries, num_positions]."""
    first = torch.zeros((), dtype=torch.long, device=device)
    q = torch.tensor(queries, device=device)[:, None]
    seen = mask_function(first, first, q, torch.arange(num_positions, device=device)[None])
    return torch.as_tensor(seen, device=device).expand(len(queries), num_positions)


def _refuse_extras(call: AttentionCall) -> None:
    for name, value in call.others.items():
        if name in _HARMLESS or name in ("sliding_window", "softcap") or value is None or value is False:
            continue
        what = "attention sinks" if name == "s_aux" else f"the argument {name!r}"
        raise Refused(f"its attention takes {what}, which ours does not")
