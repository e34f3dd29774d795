"""Which operators compute a model on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import structlog
import torch

from common.errors import ConfigError
from engine_worker.config import ComputeSettings
from engine_worker.kernels.build import BuildSettings, KernelsUnavailable, TargetName
from engine_worker.kernels.cpu import CpuOps
from engine_worker.kernels.kv_quantization import KvFormat
from engine_worker.kernels.ops import Ops
from engine_worker.kernels.ops_torch import TorchOps
from engine_worker.kernels.packing import WeightFormat
from engine_worker.models.registry import ModelShape

log = structlog.get_logger(__name__)

Quantization = Literal["none", "int8", "int4"]
Dtype = Literal["auto", "float32", "bfloat16"]
KvCacheDtype = Literal["auto", "bfloat16", "int8"]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NATIVE_BLOCK = 32  # a block size that the native kernels serve; others are refused where the cache is sized


@dataclass(frozen=True, slots=True)
class Backend:
    """Operators and what they compute in."""

    name: Literal["native", "triton", "torch"]
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    is_batch_invariant: bool = False  # a token's result is the same bits in any batch
    target: TargetName | None = None  # instructions of the native kernels
    kv_format: KvFormat = "activations"

    @property
    def dtype_name(self) -> str:
        """float32 | bfloat16."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def kv_cache_dtype(self) -> str:
        """float32 | bfloat16 | int8."""
        return self.dtype_name if self.kv_format == "activations" else self.kv_format


def choose_backend(
    settings: ComputeSettings, dtype: Dtype, config: ModelShape | None, kv_cache_dtype: KvCacheDtype = "auto"
) -> Backend:
    """Operators for ``config``; with "auto" our own where this machine and the model's shapes allow it.

    ``config`` is None for a model whose shape is known only once it is loaded.

    Sets the number of compute threads of this process. Raises `ConfigError` when what was asked for cannot be had.
    """
    device = _device(settings.device)
    num_threads = settings.num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    kv_format: KvFormat = "int8" if kv_cache_dtype == "int8" else "activations"
    backend = _choose(settings, dtype, config, kv_format, device)
    if kv_cache_dtype == "bfloat16" and backend.dtype is not torch.bfloat16:
        raise ConfigError(
            f"kv_cache_dtype bfloat16 cannot be used: the model is computed in {backend.dtype_name}, and its keys and "
            f"values are in the same or in int8",
            param="kv_cache_dtype",
        )
    return backend


def _choose(
    settings: ComputeSettings, dtype: Dtype, config: ModelShape | None, kv_format: KvFormat, device: torch.device
) -> Backend:
    own = "native" if device.type == "cpu" else "triton"
    wanted = own if settings.backend == "auto" else settings.backend
    if wanted == "torch":
        return _torch(dtype, device, settings, kv_format)
    try:
        if wanted == "triton":
            return _triton(dtype, device, settings, kv_format)
        return _native(dtype, config, device, settings, kv_format)
    except (KernelsUnavailable, ImportError, ValueError) as error:
        if settings.backend != "auto":
            raise ConfigError(f"backend {wanted} cannot be used: {error}", param="backend") from error
        log.warning("own_kernels_unavailable", backend=wanted, reason=str(error), instead="torch")
    return _torch(dtype, device, settings, kv_format)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)  # a device may have a name and not exist
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for CUDA
        reason = str(error).strip().split("\n", 1)[0]
        raise ConfigError(f"device: {name!r} cannot be used: {reason}", param="device") from error
    return device


def _native(
    dtype: Dtype, config: ModelShape | None, device: torch.device, settings: ComputeSettings, kv_format: KvFormat
) -> Backend:
    if device.type != "cpu":
        raise ValueError(f"it computes on the CPU, not on {device}")
    weight_format: WeightFormat = "fp32" if dtype == "float32" else "auto"
    build = BuildSettings(target=settings.native_target)
    ops = CpuOps(weight_format, num_threads=torch.get_num_threads(), build=build, kv_format=kv_format)
    if config is not None:
        ops.kv_bytes_per_block(config.num_layers, _NATIVE_BLOCK, config.num_kv_heads, config.head_size)
    return Backend(
        "native", ops, ops.activation_dtype, device, is_batch_invariant=True, target=ops.target, kv_format=kv_format
    )


def _triton(dtype: Dtype, device: torch.device, settings: ComputeSettings, kv_format: KvFormat) -> Backend:
    # Only here: triton is an extra, and importing it does not mean that a launch would work.
    from engine_worker.kernels.gpu.launch import is_usable
    from engine_worker.kernels.triton_ops import TritonOps

    if not is_usable():
        raise ValueError("there is no GPU with a driver")
    if kv_format != "activations":
        raise ConfigError(
            f"kv_cache_dtype {kv_format} cannot be used: the triton kernels keep keys and values in the model's dtype; "
            f"use auto, or the native or torch backend",
            param="kv_cache_dtype",
        )
    chosen = torch.bfloat16 if dtype == "auto" else _DTYPES[dtype]
    ops = TritonOps(chosen, device, deterministic=settings.deterministic)
    return Backend("triton", ops, chosen, device, is_batch_invariant=settings.deterministic)


def _torch(dtype: Dtype, device: torch.device, settings: ComputeSettings, kv_format: KvFormat) -> Backend:
    if settings.deterministic:
        raise ConfigError(
            "deterministic: plain torch chooses its matrix products by the number of rows, so it cannot promise the "
            "same logits in any batch; use the native or triton backend",
            param="deterministic",
        )
    chosen = _DTYPES[dtype] if dtype != "auto" else _fast_dtype(device)
    return Backend("torch", TorchOps(chosen, device, kv_format=kv_format), chosen, device, kv_format=kv_format)


def _fast_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where it is computed in hardware; emulated it would be slower than float32."""
    if device.type != "cpu":
        return torch.bfloat16
    is_fast = torch._C._has_mkldnn and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.bfloat16 if is_fast else torch.float32
