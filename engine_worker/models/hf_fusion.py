"""Linear modules that read one and the same tensor, such as q, k and v, computed as one product.

Which do is not guessed from names: one forward pass is watched. A call from Python costs more than a small product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from engine_worker.kernels.ops import Ops, PackedLinear


@dataclass(slots=True)
class SharedInputs:
    """Children of one module that were given the very same tensor, found by `watching`."""

    _calls: list[tuple[nn.Module, str, Tensor]] = field(default_factory=list)  # the tensors live: no id comes twice

    def note(self, parent: nn.Module, name: str, _: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            self._calls.append((parent, name, arguments[0]))

    def groups(self) -> Iterator[tuple[nn.Module, list[str]]]:
        """(parent, names of two children or more), each child called once in the pass, in the order of the calls."""
        times = Counter((id(parent), name) for parent, name, _ in self._calls)
        found: dict[tuple[int, int], tuple[nn.Module, list[str]]] = {}
        for parent, name, given in self._calls:
            if times[id(parent), name] == 1:
                found.setdefault((id(parent), id(given)), (parent, []))[1].append(name)
        yield from (group for group in found.values() if len(group[1]) > 1)


@contextmanager
def watching(model: nn.Module) -> Iterator[SharedInputs]:
    """Note what every module without children is given by its parent, for as long as the context lasts."""
    shared = SharedInputs()
    hooks = [
        child.register_forward_pre_hook(partial(shared.note, parent, name))
        for parent in model.modules()
        for name, child in parent.named_children()
        if not any(True for _ in child.children())
    ]
    try:
        yield shared
    finally:
        for hook in hooks:
            hook.remove()


class FusedProduct:
    """One product for several modules. The first to be called computes it, the others take their columns of it.

    A module that is given another tensor than the one before it computes anew: slower, never wrong.
    """

    def __init__(self, ops: Ops, linear: PackedLinear, sizes: list[int]) -> None:
        self._ops = ops
        self._linear = linear
        self._sizes = sizes
        self._given: Tensor | None = None
        self._parts: list[Tensor | None] = []

    def part(self, index: int, x: Tensor) -> Tensor:
        """[..., K] -> [..., N of this part]."""
        part = self._parts[index] if x is self._given else None
        if part is None:
            rows = x.reshape(-1, self._linear.k).to(self._ops.activation_dtype).contiguous()
            self._given, self._parts = x, list(torch.split(self._ops.linear(rows, self._linear), self._sizes, dim=1))
            part = self._parts[index]
            assert part is not None
        self._parts[index] = None
        if not any(other is not None for other in self._parts):
            self._given = None  # nobody is left who wants it: let go of the memory
        return part.contiguous().view(*x.shape[:-1], self._sizes[index]).to(x.dtype)


class FusedPart(nn.Module):
    """Stands for one linear module of a `FusedProduct`."""

    def __init__(self, product: FusedProduct, index: int, in_features: int, out_features: int, dtype: torch.dtype):
        super().__init__()
        self._product = product
        self._index = index
        self.in_features, self.out_features = in_features, out_features
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device="meta")  # as `PackedModule`
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        return self._product.part(self._index, x)
