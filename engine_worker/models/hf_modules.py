"""Modules of transformers' models replaced by our operators, where these compute the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, cast

import torch
from torch import Tensor, nn

from engine_worker.kernels.ops import DenseWeight, Ops, PackedLinear, Weight
from engine_worker.kernels.packing import quantize_int4, quantize_int8
from engine_worker.models.hf_fusion import FusedPart, FusedProduct, SharedInputs
from engine_worker.models.layers import stack

Quantization = Literal["none", "int8", "int4"]

# They choose experts: small, and a coarser weight would send tokens elsewhere.
_ROUTERS: Final = ("gate", "router", "shared_expert_gate")
_GROUP: Final = 32  # quantised weights are in groups of so many along K


class PackedModule(nn.Module):
    """Stands for an `nn.Linear`."""

    def __init__(self, ops: Ops, linear: PackedLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self._ops = ops
        self._linear = linear
        self.in_features, self.out_features = linear.k, linear.n
        # Models look at their weights' dtype; to compute with this one fails.
        self.weight = torch.empty(linear.n, linear.k, dtype=dtype, device="meta")
        self.bias = None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self._linear.k).to(self._ops.activation_dtype).contiguous()
        return self._ops.linear(rows, self._linear).view(*x.shape[:-1], self._linear.n).to(x.dtype)


class NormModule(nn.Module):
    """Stands for an RMSNorm."""

    def __init__(self, norm: Callable[[Tensor, Tensor, float], Tensor], weight: Tensor, eps: float) -> None:
        super().__init__()
        self._norm = norm
        self.weight = nn.Parameter(weight, requires_grad=False)  # fp32
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).float().contiguous()
        return self._norm(rows, self.weight, self._eps).view(x.shape).to(x.dtype)


def swap_linears(model: nn.Module, ops: Ops, quantization: Quantization, head: nn.Module | None) -> int:
    """Pack every linear module but the routers'; dense memory is given up one by one. Returns how many.

    ``head``: the output head, if it is one of them.
    """
    count = 0
    for parent, name, module in list(_children(model)):
        weight = _matrix(module)
        if weight is None or name in _ROUTERS or weight.dtype is not ops.activation_dtype:
            continue
        bias: Tensor | None = module.bias.detach().float() if module.bias is not None else None  # type: ignore[operator]
        # The head loses more by coarse weights than a layer does.
        target = "int8" if module is head and quantization == "int4" else quantization
        converted = _convert(weight, target)
        packed = ops.pack_head(converted) if module is head and bias is None else ops.pack(converted, bias)
        setattr(parent, name, PackedModule(ops, packed, weight.dtype))
        count += 1
    return count


def fuse_linears(shared: SharedInputs, ops: Ops, quantization: Quantization) -> int:
    """One product for linear modules that read the same tensor. Call it before `swap_linears`. Returns how many."""
    count = 0
    for parent, names in shared.groups():
        modules = {name: parent.get_submodule(name) for name in names if name not in _ROUTERS}
        weights = {name: weight for name, module in modules.items() if (weight := _matrix(module)) is not None}
        if len(weights) < 2 or any(weight.dtype is not ops.activation_dtype for weight in weights.values()):
            continue
        packed = ops.pack(
            stack([_convert(weight, quantization) for weight in weights.values()]),
            _biases([modules[name] for name in weights], list(weights.values())),
        )
        product = FusedProduct(ops, packed, [len(weight) for weight in weights.values()])
        for index, (name, weight) in enumerate(weights.items()):
            setattr(parent, name, FusedPart(product, index, packed.k, len(weight), weight.dtype))
        count += 1
    return count


def _biases(modules: list[nn.Module], weights: list[Tensor]) -> Tensor | None:
    """fp32, one after the other, zeros where a module has none; None where none has."""
    found: list[Any] = [module.bias for module in modules]
    if all(bias is None for bias in found):
        return None
    parts = zip(found, weights, strict=True)
    return torch.cat([w.new_zeros(len(w)).float() if bias is None else bias.detach().float() for bias, w in parts])


def swap_norms(model: nn.Module, ops: Ops) -> int:
    """Replace the RMSNorm modules whose results ours equals, found by trying both. Returns how many."""
    count = 0
    for parent, name, norm in list(_children(model)):
        ours = _equal_norm(norm, ops)
        if ours is not None:
            setattr(parent, name, ours)
            count += 1
    return count


def _children(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            yield parent, name, child


def _matrix(module: nn.Module) -> Tensor | None:
    """The weight [N, K] of a plain linear module. None for all others, subclasses too: they may do more."""
    from transformers.pytorch_utils import Conv1D

    if type(module) is nn.Linear:
        return module.weight.detach()
    if type(module) is Conv1D:  # GPT-2's linear, stored the other way round
        return cast("Tensor", module.weight).detach().t().contiguous()
    return None


def _convert(weight: Tensor, target: Quantization) -> Weight:
    if target == "none" or weight.shape[1] % _GROUP:
        return DenseWeight(weight)
    return quantize_int8(weight) if target == "int8" else quantize_int4(weight)


def _equal_norm(norm: nn.Module, ops: Ops) -> NormModule | None:
    """Ours, if it gives what ``norm`` gives, with its weight as it is or with 1 added (Gemma)."""
    weight: Any = getattr(norm, "weight", None)
    eps: Any = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    is_candidate = "RMSNorm" in type(norm).__name__ and isinstance(weight, Tensor) and isinstance(eps, float)
    if not is_candidate or weight.dim() != 1 or len(list(norm.parameters())) != 1:
        return None
    x = torch.randn(4, weight.shape[0], generator=torch.Generator().manual_seed(0)).to(weight.device)
    theirs = copy.deepcopy(norm).float()(x)
    for offset in (0.0, 1.0):
        ours = NormModule(ops.norm, weight.detach().float() + offset, eps)
        if theirs.shape == x.shape and torch.allclose(ours(x), theirs, atol=1e-5, rtol=1e-5):
            return ours
    return None
