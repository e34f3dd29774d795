"""Cost of drawing a step's tokens: milliseconds, best and median, by batch size, vocabulary and kind of request.

python -m bench.sampling
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from common.events import SamplingParams
from engine_worker.sampling.sampler import Sampler
from engine_worker.sequence import Sequence

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "presence_penalty": 0.1},
    "greedy, bias on 20 tokens": {"temperature": 0.0, "logit_bias": dict.fromkeys(range(20), 1.0)},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
    "temperature": {},
    "top-k 50": {"top_k": 50},
    "top-k 50, top-p 0.95, min-p 0.05": {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
    "top-p 0.9": {"top_p": 0.9},
    "top-p 0.99 at temperature 1.5": {"temperature": 1.5, "top_p": 0.99},  # thousands of candidates in every row
}


def _rows(batch: int, params: dict[str, Any]) -> list[Sequence]:
    return [
        Sequence(
            seq_id=row,
            request_id=f"r{row}",
            choice=0,
            prompt_token_ids=tuple(range(row, row + 300)),
            sampling=SamplingParams(max_tokens=1000, seed=row, **params),
            max_model_len=8192,
        )
        for row in range(batch)
    ]


def _times_ms(logits: torch.Tensor, params: dict[str, Any], repeats: int) -> list[float]:
    rows, sampler, times = _rows(len(logits), params), Sampler(logits.shape[1]), []
    for _ in range(repeats + 1):
        copy = logits.clone()
        started = time.perf_counter()
        output = sampler.sample(copy, rows)
        times.append((time.perf_counter() - started) * 1e3)
        for token in output.sampled:
            token.sequence.append(token.token_id)
    return times[1:]  # the first step builds the batch


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    print(f"{'':34s} {'V':>7s} {'batch':>5s} {'best':>8s} {'median':>8s}")
    for vocab_size in (49_152, 151_936):
        for batch in (1, 8, 32):
            logits = torch.randn(batch, vocab_size, generator=generator) * 2.5
            logits[:, :200] += torch.rand(batch, 200, generator=generator) * 12
            for name, params in KINDS.items():
                times = _times_ms(logits, params, repeats=15)
                print(f"{name:34s} {vocab_size:7d} {batch:5d} {min(times):8.3f} {statistics.median(times):8.3f}")


if __name__ == "__main__":
    main()
