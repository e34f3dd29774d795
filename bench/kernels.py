"""Speed of the native CPU kernels against plain torch, interleaved in one run.

    python -m bench.kernels [linear|attention|step ...] [--formats bf16,int8,int4] [--seconds 0.5] [--against DIR]
        [--target avx2] [--torch fp32]

Shapes are SmolLM2-135M's with random weights; all layers have weights of their own, so that these come from memory as
in real decoding. Each figure is the best of many repeats in milliseconds; torch runs in bf16 unless told otherwise. On
a shared machine only ratios of one run mean anything. DIR holds the native sources of another version: they run in turn
with these.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine_worker.kernels.build import TARGETS, BuildSettings
from engine_worker.kernels.cpu import CpuOps
from engine_worker.kernels.ops import (
    Activation,
    AttentionMetadata,
    AttentionShape,
    DecoderLayer,
    DenseWeight,
    KvCache,
    LayerOps,
    Ops,
    PackedLinear,
)
from engine_worker.kernels.ops_torch import TorchOps

HIDDEN, LAYERS, INTERMEDIATE, VOCAB = 576, 30, 1536, 49152
SHAPE = AttentionShape(num_heads=9, num_kv_heads=3, head_size=64, scale=0.125)
QKV = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_size
BLOCK = 32
EPS = 1e-5


@dataclass(frozen=True)
class Layer:
    attention_norm: Tensor
    qkv: PackedLinear
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


class Model:
    """A Llama of random weights, stepped operator by operator."""

    def __init__(self, ops: Ops, num_blocks: int) -> None:
        g = torch.Generator().manual_seed(0)

        def random(n: int, k: int) -> DenseWeight:
            return DenseWeight(torch.randn(n, k, generator=g) * 0.04)

        self.ops = ops
        ones = torch.ones(HIDDEN)
        self.layers = [
            Layer(
                ones,
                ops.pack(random(QKV, HIDDEN)),
                ops.pack(random(HIDDEN, HIDDEN)),
                ones,
                ops.pack_gate_up(random(INTERMEDIATE, HIDDEN), random(INTERMEDIATE, HIDDEN)),
                ops.pack(random(HIDDEN, INTERMEDIATE)),
            )
            for _ in range(LAYERS)
        ]
        self.embedding = random(VOCAB, HIDDEN).values.bfloat16()
        self.head = ops.pack_head(DenseWeight(self.embedding))
        self.norm = ones
        angles = torch.arange(8192)[:, None] / 1e5 ** (torch.arange(0, 64, 2) / 64)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], 1).contiguous()
        self.cache: KvCache = ops.allocate_kv(LAYERS, num_blocks, BLOCK, SHAPE.num_kv_heads, SHAPE.head_size)
        if isinstance(ops, LayerOps):
            self.packed_layers = ops.pack_layers([self._whole(layer) for layer in self.layers])

    def _whole(self, layer: Layer) -> DecoderLayer:
        return DecoderLayer(
            shape=SHAPE,
            qkv=layer.qkv,
            output=layer.output,
            gate_up=layer.gate_up,
            down=layer.down,
            attention_norm=layer.attention_norm,
            mlp_norm=layer.mlp_norm,
            norm_eps=EPS,
            activation=Activation.SILU,
            cos_sin=self.cos_sin,
        )

    def fused(self, token_ids: Tensor, meta: AttentionMetadata, last: Tensor) -> Tensor:
        """The same step with all layers in one call."""
        assert isinstance(self.ops, LayerOps)
        x = self.embedding[token_ids].float()
        self.ops.run_layers(x, self.packed_layers, self.cache, meta)
        return self.ops.logits(x[last], self.norm, EPS, self.head)

    def step(self, token_ids: Tensor, meta: AttentionMetadata, last: Tensor) -> Tensor:
        ops, x = self.ops, self.embedding[token_ids].float()
        for i, layer in enumerate(self.layers):
            qkv = ops.norm_linear(x, layer.attention_norm, EPS, layer.qkv)
            ops.rope_write_kv(qkv, self.cos_sin, self.cache, i, meta, SHAPE)
            ops.linear_add(ops.attention(qkv, self.cache, i, meta, SHAPE), layer.output, x)
            h = ops.norm_gate_up(x, layer.mlp_norm, EPS, layer.gate_up, Activation.SILU)
            ops.linear_add(h, layer.down, x)
        return ops.logits(x[last], self.norm, EPS, self.head)


@dataclass(frozen=True)
class Batch:
    """Sequences as (new tokens, tokens in all), each with blocks of its own in random order."""

    name: str
    sequences: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return sum(new for new, _ in self.sequences)

    @property
    def num_blocks(self) -> int:
        return sum(-(-total // BLOCK) for _, total in self.sequences)

    def metadata(self) -> AttentionMetadata:
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(1)).int()
        longest = max(total for _, total in self.sequences)
        tables = torch.zeros(len(self.sequences), -(-longest // BLOCK), dtype=torch.int32)
        positions, slots, starts, used = [], [], [0], 0
        for row, (new, total) in enumerate(self.sequences):
            blocks = -(-total // BLOCK)
            tables[row, :blocks] = order[used : used + blocks]
            used += blocks
            at = torch.arange(total - new, total)
            positions.append(at)
            slots.append(tables[row][at // BLOCK] * BLOCK + at % BLOCK)
            starts.append(starts[-1] + new)
        return AttentionMetadata(
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([total for _, total in self.sequences], dtype=torch.int32),
            block_table_rows=torch.arange(len(self.sequences), dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.cat(slots).int(),
            positions=torch.cat(positions).int(),
            max_query_len=max(new for new, _ in self.sequences),
            max_seq_len=longest,
        )


BATCHES = (
    Batch("decode 1 @128", ((1, 128),)),
    Batch("decode 8 @128", ((1, 128),) * 8),
    Batch("decode 32 @128", ((1, 128),) * 32),
    Batch("decode 1 @4096", ((1, 4096),)),
    Batch("decode 32 @1024", ((1, 1024),) * 32),
    Batch("decode 64 @128", ((1, 128),) * 64),
    Batch("prefill 512", ((512, 512),)),
    Batch("prefill 512 + 8 decodes", ((512, 512),) + ((1, 128),) * 8),
)


def interleaved(cases: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Best milliseconds of each case; their repeats alternate, for ``seconds`` each."""
    best = dict.fromkeys(cases, float("inf"))
    for run in cases.values():
        run()
    end = time.perf_counter() + seconds * len(cases)
    while time.perf_counter() < end:
        for name, run in cases.items():
            for _ in range(3):
                start = time.perf_counter()
                run()
                best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
    return best


def show(name: str, best: dict[str, float], note: str = "") -> None:
    torch_ms = best["torch"]
    cells = "".join(f"  {case} {ms:8.2f} ({torch_ms / ms:4.1f}x)" for case, ms in best.items() if case != "torch")
    print(f"{name:26s} torch {torch_ms:8.2f}{cells}  {note}", flush=True)


def bench_linear(models: dict[str, Model], seconds: float) -> None:
    """The 120 linear layers of a step, without attention."""
    for num_rows in (1, 8, 32, 512):
        best = interleaved({name: _linears(model, num_rows) for name, model in models.items()}, seconds)
        show(f"linears, {num_rows} rows", best)


def _linears(model: Model, num_rows: int) -> Callable[[], object]:
    ops, dtype = model.ops, model.ops.activation_dtype
    x, residual = torch.randn(num_rows, HIDDEN), torch.zeros(num_rows, HIDDEN)
    attended, gated = torch.randn(num_rows, HIDDEN).to(dtype), torch.randn(num_rows, INTERMEDIATE).to(dtype)

    def run() -> None:
        for layer in model.layers:
            ops.norm_linear(x, layer.attention_norm, EPS, layer.qkv)
            ops.linear_add(attended, layer.output, residual)
            ops.norm_gate_up(x, layer.mlp_norm, EPS, layer.gate_up, Activation.SILU)
            ops.linear_add(gated, layer.down, residual)

    return run


def bench_attention(models: dict[str, Model], seconds: float) -> None:
    """Attention of one layer."""
    for batch in BATCHES:
        best = interleaved({name: _attention(model, batch) for name, model in models.items()}, seconds)
        show(f"attention, {batch.name}", best)


def _attention(model: Model, batch: Batch) -> Callable[[], object]:
    meta, qkv = batch.metadata(), torch.randn(batch.num_tokens, QKV).to(model.ops.activation_dtype)
    return lambda: model.ops.attention(qkv, model.cache, 3, meta, SHAPE)


def bench_step(models: dict[str, Model], seconds: float) -> None:
    """A whole step, head included, as the decoder runs it: ms and tokens a second."""
    for batch in BATCHES:
        best = interleaved({name: _step(model, batch) for name, model in models.items()}, seconds)
        rates = " ".join(f"{name} {batch.num_tokens / ms * 1e3:.0f}" for name, ms in best.items())
        show(f"step, {batch.name}", best, f"tok/s: {rates}")


def _step(model: Model, batch: Batch) -> Callable[[], object]:
    meta, token_ids = batch.metadata(), torch.randint(0, VOCAB, (batch.num_tokens,))
    last = meta.query_start[1:].long() - 1
    step = model.fused if isinstance(model.ops, LayerOps) else model.step
    return lambda: step(token_ids, meta, last)


BENCHES = {"linear": bench_linear, "attention": bench_attention, "step": bench_step}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="linear, attention, step; none given: all")
    parser.add_argument("--formats", default="bf16,int8,int4")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--against", type=Path, help="native sources of another version, run in turn with these")
    parser.add_argument("--target", choices=("auto", *TARGETS), default="auto", help="instructions of the kernels")
    parser.add_argument("--torch", choices=("bf16", "fp32"), default="bf16", help="what plain torch computes in")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    num_blocks = max(batch.num_blocks for batch in BATCHES)
    models = {"torch": Model(TorchOps(torch.bfloat16 if args.torch == "bf16" else torch.float32), num_blocks)}
    for weight_format in args.formats.split(","):
        if args.against:
            other = CpuOps(weight_format, build=BuildSettings(source_dir=args.against, target=args.target))
            models[f"{weight_format} before"] = Model(other, num_blocks)
        models[weight_format] = Model(CpuOps(weight_format, build=BuildSettings(target=args.target)), num_blocks)
    for what in args.what or BENCHES:
        BENCHES[what](models, args.seconds)


if __name__ == "__main__":
    main()
