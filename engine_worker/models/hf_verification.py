"""A model computed our way against itself computed by transformers: what the trace could not see shows here.

The text is cut into chunks and single tokens and computed beside another, as the scheduler does it; transformers
computes it at once. State that is kept anywhere but in our cache, biases we do not add, tokens that look at their
neighbours outside of attention: all of them make the two differ.
"""

from __future__ import annotations

import itertools
from typing import Final, Protocol

import torch
from torch import Tensor

from engine_worker.kernels.ops import AttentionMetadata, KvCache, Ops
from engine_worker.models.hf_refusals import Refused

PROBE_BLOCK: Final = 32  # a block size that every `Ops` serves
_LENGTH: Final = 24
_CUTS: Final = (0, 9, 18, *range(19, _LENGTH + 1))
_COMPARED: Final = (slice(0, 9), slice(9, 18), slice(18, _LENGTH))  # first chunk, later chunk, decodes
_TOLERANCES: Final = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
_MAX_TOLERANCE: Final = 0.3


class Shape(Protocol):
    """Of the cache."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...


class Verified(Protocol):
    """The part of a decoder that is looked at."""

    @property
    def config(self) -> Shape: ...

    def hidden(self, token_ids: Tensor, cache: KvCache, meta: AttentionMetadata) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def probe_tokens(vocab_size: int, device: torch.device) -> Tensor:
    """int64 [24]: a text without meaning, the same each time."""
    tokens = torch.randint(0, vocab_size, (_LENGTH,), generator=torch.Generator().manual_seed(1))
    return tokens.to(device)


def tolerance(dtype: torch.dtype, expected: Tensor, again: Tensor | None) -> float:
    """Relative difference of hidden states that rounding explains.

    ``again``: the same as ``expected`` by another of transformers' own attentions. Where routers choose experts these
    two may lie far apart in bfloat16, and so may ours.
    """
    usual = _TOLERANCES[dtype]
    return usual if again is None else max(usual, min(4 * _difference(again, expected), _MAX_TOLERANCE))


def verify(decoder: Verified, ops: Ops, tokens: Tensor, expected: Tensor, tolerance: float) -> None:
    """``expected``: fp32 [T, D], the hidden states of ``tokens`` by transformers. Raises `Refused`."""
    shape = decoder.config
    cache = ops.allocate_kv(shape.num_layers, 2, PROBE_BLOCK, shape.num_kv_heads, shape.head_size)
    other = tokens.flip(0)
    found = []
    for start, end in itertools.pairwise(_CUTS):
        both = torch.cat([other[start:end], tokens[start:end]])
        found.append(decoder.hidden(both.int(), cache, _metadata(start, end, tokens.device))[end - start :])
    hidden = torch.cat(found)
    logits = decoder.logits(hidden)
    if not bool(torch.isfinite(logits).all()):
        raise Refused("its logits are not finite")
    worst = _difference(hidden, expected)
    if not worst <= tolerance:
        raise Refused(
            f"over our cache it computes something else than over transformers' own attention (hidden states differ "
            f"by {worst:.1%}): its tokens influence each other in a way that a paged KV cache does not carry"
        )


def _difference(found: Tensor, expected: Tensor) -> float:
    """Of the part that differs most its median token: a router may send one elsewhere for a rounding error."""
    difference = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)
    return max(float(difference[part].median()) for part in _COMPARED)


def _metadata(start: int, end: int, device: torch.device) -> AttentionMetadata:
    """Two sequences, each in a block of its own, at the same positions."""

    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    positions = range(start, end)
    return AttentionMetadata(
        query_start=ints(0, end - start, 2 * (end - start)),
        seq_lens=ints(end, end),
        block_table_rows=ints(0, 1),
        block_tables=torch.tensor([[0], [1]], dtype=torch.int32, device=device),
        slot_mapping=ints(*positions, *(PROBE_BLOCK + p for p in positions)),
        positions=ints(*positions, *positions),
        max_query_len=end - start,
        max_seq_len=end,
    )
