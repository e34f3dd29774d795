"""Which decoder serves which architecture."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from engine_worker.kernels.ops import AttentionMetadata, KvCache
from engine_worker.models.config import DecoderConfig


class Decoder(Protocol):
    """A decoder-only model over a flat batch of tokens."""

    config: DecoderConfig

    def hidden(self, token_ids: Tensor, cache: KvCache, meta: AttentionMetadata) -> Tensor:
        """int32/int64 [T] -> fp32 [T, D] before the final norm; writes K and V of all T tokens."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [R, D], rows of `hidden` -> fp32 [R, V], contiguous."""
        ...
