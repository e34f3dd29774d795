"""Steps of a model as transformers itself computes them, beside `headrace bench step` on the same directory.

    python -m bench.eager DIR [--threads 1] [--batch 1 8] [--context 128] [--prefill 512] [--seconds 2]

bf16, transformers' own attention (eager and sdpa) and its dynamic cache; greedy choice of the next token included. The
context is random tokens, computed before the clock runs. Milliseconds are medians.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.clock import median_ms
from cli.bench.machine import Disturbance


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench.eager", description=(__doc__ or "").strip())
    parser.add_argument("directory")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    others = Disturbance()
    for attention in ("eager", "sdpa"):
        model: Any = AutoModelForCausalLM.from_pretrained(
            args.directory, dtype=torch.bfloat16, attn_implementation=attention, local_files_only=True
        ).eval()
        for batch in args.batch:
            ms = decode_ms(model, batch, args.context, args.seconds)
            print(f"{attention} {batch} @{args.context}: {ms:.2f} ms, {1000 * batch / ms:.0f} tokens/s", flush=True)
        ms = prefill_ms(model, args.prefill, args.seconds)
        print(f"{attention} prefill {args.prefill}: {ms:.1f} ms, {1000 * args.prefill / ms:.0f} tokens/s", flush=True)
    print(f"others kept {others.cores():.2f} cores busy")
    return 0


@torch.inference_mode()
def decode_ms(model: Any, batch: int, context: int, seconds: float) -> float:
    """Of one step of ``batch`` sequences, whose contexts grow meanwhile."""
    ids = torch.randint(0, model.config.vocab_size, (batch, context))
    first = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    state = [first.logits[:, -1:].argmax(-1), first.past_key_values]

    def step() -> None:
        out = model(input_ids=state[0], past_key_values=state[1], use_cache=True)
        state[:] = out.logits[:, -1:].argmax(-1), out.past_key_values

    return median_ms(step, seconds, warm_up=1, most=context // 4)


@torch.inference_mode()
def prefill_ms(model: Any, tokens: int, seconds: float) -> float:
    ids = torch.randint(0, model.config.vocab_size, (1, tokens))
    return median_ms(lambda: model(input_ids=ids, use_cache=True, logits_to_keep=1), seconds, warm_up=1, most=50)


if __name__ == "__main__":
    sys.exit(main())
