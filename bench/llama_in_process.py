"""llama.cpp in this process, one request at a time: what a single stream could get at best from that engine.

    python -m bench.llama_in_process FILE.gguf OUT.json [--requests 6] [--prompt-tokens 128] [--output-tokens 128]

Needs the package llama-cpp-python. No HTTP, no text: to be compared with `headrace bench engine`, and a bound for a
server.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import llama_cpp

from cli.bench.figures import Objective, Outcome, summarise
from cli.bench.workload import Prose


def answer(llama: Any, prompt: list[int], num_output: int) -> Outcome:
    """One greedy answer of exactly ``num_output`` tokens."""
    outcome = Outcome(time.perf_counter(), prompt_tokens=len(prompt), has_usage=True, finish_reason="length")
    for _ in itertools.islice(llama.generate(prompt, temp=0.0, reset=True), num_output):
        now = time.perf_counter()
        if outcome.last_s is None:
            outcome.first_s = now
        else:
            outcome.gaps_s.append(now - outcome.last_s)
        outcome.last_s = outcome.ended_s = now
        outcome.num_chunks += 1
    outcome.output_tokens = outcome.num_chunks
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("gguf", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    llama = llama_cpp.Llama(
        str(arguments.gguf), n_ctx=4096, n_threads=threads, n_threads_batch=threads, seed=0, verbose=False
    )
    prose, rng = Prose(), random.Random(arguments.seed)

    def prompt() -> list[int]:
        text = prose.words(rng, arguments.prompt_tokens).encode()
        return list(llama.tokenize(text, add_bos=False))[: arguments.prompt_tokens]

    answer(llama, prompt(), 8)
    outcomes = [answer(llama, prompt(), arguments.output_tokens) for _ in range(arguments.requests)]
    arguments.out.write_text(json.dumps(summarise(outcomes, Objective()).as_json()), encoding="utf-8")


if __name__ == "__main__":
    main()
