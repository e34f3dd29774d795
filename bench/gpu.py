"""The GPU path on the GPU of this machine: are its operators right, and how fast are they.

    python -m bench.gpu [--json FILE] [--seconds 1] [--checks-only]
    python -m bench.gpu --interpret        # no GPU: the checks alone, tiny shapes, in Triton's interpreter

1. Every Triton operator against plain torch. 2. Each kernel over its floor: the time to move its bytes at the speed of
a large copy, or to multiply at that of a large matrix product, both measured here; the cache is flushed in between.
3. Whole steps of the runner (inputs, forward pass, sampling, read-back) with models of random weights; keys and values
of contexts are zeros, which cost the same to read. ``floor`` of a step: its weights and context read once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by

SMOLLM2: Final[dict[str, Any]] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
LLAMA_1B: Final[dict[str, Any]] = SMOLLM2 | {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MODELS: Final = {"SmolLM2-135M": SMOLLM2, "Llama-1B": LLAMA_1B}
BATCHES, CONTEXTS, PREFILLS = (1, 8, 32, 64, 256), (128, 1024), (512, 2048)
BLOCK_SIZE: Final = 32


@dataclass(frozen=True, slots=True)
class Speeds:
    """What this GPU does at most, measured."""

    bytes_per_s: float
    flops_per_s: float

    def floor_ms(self, num_bytes: float, flops: float = 0.0) -> float:
        return 1e3 * max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class Timing:
    name: str
    ms: float  # median
    floor_ms: float
    tokens_per_s: float | None = None

    def line(self) -> str:
        rate = "" if self.tokens_per_s is None else f"{self.tokens_per_s:>12,.0f} tok/s"
        return f"{self.name:<46}{self.ms:>10.4f} ms{self.ms / self.floor_ms:>8.2f} x floor{rate}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interpret", action="store_true", help="the checks alone, without a GPU")
    parser.add_argument("--checks-only", action="store_true", help="leave the timings out")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each row of steps")
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    if args.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # read as the kernels are imported
    elif not torch.cuda.is_available():
        print("bench.gpu: there is no GPU that torch can use; --interpret runs the checks without one", file=sys.stderr)
        return 2
    device = torch.device("cpu" if args.interpret else "cuda")
    report: dict[str, Any] = {"device": "interpreter" if args.interpret else torch.cuda.get_device_name(device)}
    print(f"device: {report['device']}")
    num_bad = _check(device, report)
    if not args.interpret and not args.checks_only:
        _measure(device, args.seconds, report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 1 if num_bad else 0


def _check(device: torch.device, report: dict[str, Any]) -> int:
    """Checks that failed. Prints those, and the worst of each dtype's errors over its tolerance."""
    from bench.gpu_checks import FULL, TINY, run_checks

    checks = list(run_checks(FULL if device.type == "cuda" else TINY, device))
    bad = [check for check in checks if not check.is_good]
    for check in bad:
        print(f"WRONG  {check.name}: error {check.error:.2e}, at most {check.tolerance:.2e} is right")
    worst = max(check.error / check.tolerance for check in checks if check.tolerance)
    print(f"checks: {len(checks) - len(bad)} of {len(checks)} are right; the largest error is {worst:.2f} of its bound")
    report["checks"] = [asdict(check) for check in checks]
    return len(bad)


def _measure(device: torch.device, seconds: float, report: dict[str, Any]) -> None:
    speeds = _speeds(device)
    print(f"machine: {speeds.bytes_per_s / 1e9:,.0f} GB/s copied, {speeds.flops_per_s / 1e12:,.0f} TFLOP/s in bf16")
    report["machine"] = asdict(speeds)
    for kind, rows in (("kernels", _kernels(device, speeds)), ("steps", _steps(seconds, speeds))):
        report[kind] = []
        print(f"\n{kind}")
        for row in rows:
            print(row.line(), flush=True)
            report[kind].append(asdict(row))


def _device_ms(run: Callable[[], object], repeats: int = 20) -> float:
    """Median on the GPU's own clock. Writing a large buffer first empties its cache and hides the launches."""
    flush = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    run()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        flush.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _speeds(device: torch.device) -> Speeds:
    size, side = 1 << 30, 8192
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    copy_ms, product_ms = _device_ms(lambda: target.copy_(source)), _device_ms(lambda: a @ a)
    return Speeds(2 * size / copy_ms * 1e3, 2 * side**3 / product_ms * 1e3)


def _kernels(device: torch.device, speeds: Speeds) -> Iterator[Timing]:
    """At the shapes of Llama-1B, in bf16."""
    from bench.gpu_checks import ragged
    from engine_worker.kernels.gpu.gated_activation import gated_activation
    from engine_worker.kernels.gpu.matmul import matmul
    from engine_worker.kernels.gpu.paged_attention import paged_attention
    from engine_worker.kernels.gpu.rms_norm import rms_norm
    from engine_worker.kernels.gpu.rotary_kv import rotary_kv
    from engine_worker.kernels.ops import Activation, AttentionShape

    hidden, intermediate, shape = 2048, 8192, AttentionShape(32, 8, 64, 0.125)
    query, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16)

    weight = torch.ones(hidden, device=device)
    for rows in (1, 32, 256, 2048):
        x, gate_up = torch.randn(rows, hidden, device=device), random(rows, 2 * intermediate)
        ms = _device_ms(partial(rms_norm, x, weight, 1e-5, torch.bfloat16))
        yield Timing(f"rms_norm [{rows}, {hidden}]", ms, speeds.floor_ms(rows * hidden * 6))
        ms = _device_ms(partial(gated_activation, gate_up, Activation.SILU))
        yield Timing(f"gated_activation [{rows}, {intermediate}]", ms, speeds.floor_ms(rows * intermediate * 6))
        h, matrix = random(rows, hidden), random(2 * intermediate, hidden)
        floor = speeds.floor_ms(2 * matrix.numel(), 2 * rows * matrix.numel())
        for name, product in (("cuBLAS", F.linear), ("fixed order", matmul)):
            ms = _device_ms(partial(product, h, matrix, None))
            yield Timing(f"product, {name} [{rows}, {hidden}] x [{hidden}, {2 * intermediate}]", ms, floor)
    cos_sin = torch.rand(8192, shape.head_size, device=device)
    decodes = [(f"decode {b} @{length}", ((1, length),) * b) for b in BATCHES for length in (*CONTEXTS, 8192)]
    prefills = [(f"prefill {length}", ((length, length),)) for length in PREFILLS]
    for name, batch in (*decodes, *prefills):
        meta, num_blocks = ragged(batch, BLOCK_SIZE, device)
        tokens, keys_read = len(meta.positions), sum(total for _, total in batch)
        qkv = random(tokens, query + 2 * kv)
        keys, values = random(2, num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_size)
        rotated = 2 * tokens * (2 * query + 5 * kv)  # Q and K read and written, V read, K and V stored
        ms = _device_ms(partial(rotary_kv, qkv, cos_sin, keys, values, meta, shape, None, None, 1e-6))
        yield Timing(f"rotary_kv {name}", ms, speeds.floor_ms(rotated))
        seen = sum(new * (2 * total - new + 1) / 2 for new, total in batch)
        ms = _device_ms(partial(paged_attention, qkv, keys, values, meta, shape))
        floor = speeds.floor_ms(4 * keys_read * kv + 4 * tokens * query, 4 * seen * query)
        yield Timing(f"attention {name}", ms, floor)


def _steps(seconds: float, speeds: Speeds) -> Iterator[Timing]:
    from bench.clock import median_ms
    from bench.gpu_steps import Steps, random_model

    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as directory:
            model = random_model(config, Path(directory))
        with tempfile.TemporaryDirectory() as directory:
            fixed = random_model(config, Path(directory), deterministic=True)
        table = 2 * config["vocab_size"] * config["hidden_size"]
        layers = model.weight_bytes - 2 * table  # counted as embedding, of which few rows are read, and as head
        token_bytes = 4 * model.config.num_layers * model.config.num_kv_heads * model.config.head_size
        for batch in BATCHES:
            for context in CONTEXTS:
                floor = speeds.floor_ms(layers + table + batch * context * token_bytes)
                for how, served, graphs in (
                    ("eager", model, False),
                    ("graphs", model, True),
                    ("graphs, deterministic", fixed, True),
                ):
                    ms = median_ms(Steps(served, batch, context, graphs=graphs).decode, seconds, warm_up=3, most=200)
                    yield Timing(f"{name} decode {batch} @{context} {how}", ms, floor, 1e3 * batch / ms)
        for length in PREFILLS:
            floor = speeds.floor_ms(layers + table, length * layers)  # two operations for each two bytes
            for label, served in (("", model), (" deterministic", fixed)):
                ms = median_ms(Steps(served, 1, length, graphs=False).prefill, seconds, warm_up=3, most=200)
                yield Timing(f"{name} prefill {length}{label}", ms, floor, 1e3 * length / ms)


if __name__ == "__main__":
    sys.exit(main())
