"""OpenVINO GenAI's continuous batching in a process of its own, driven over standard input and output.

    PYTHON bench/openvino_in_process.py DIRECTORY        # PYTHON: one that has openvino-genai; nothing else is needed

DIRECTORY is a model as optimum-cli exports it. A first line says that the model has answered; then each line in, a
closed loop ``{"concurrency": 8, "jobs": [[[token ids], output tokens], ...]}``, is answered by one line with the times
of every request, in the order of the jobs. No HTTP and no text: a bound for a server, to be compared with
`headrace bench engine`.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

_CACHE_GB = 2
_MAX_SEQS = 64
_WARMUP = 8  # tokens of the first answer


class Pipeline:
    """Closed loops of greedy requests of exact length."""

    def __init__(self, directory: Path) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._openvino: Any = importlib.import_module("openvino")
        self._numpy: Any = importlib.import_module("numpy")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GB
        scheduler.max_num_seqs = _MAX_SEQS
        scheduler.enable_prefix_caching = True
        self._pipeline: Any = self._genai.ContinuousBatchingPipeline(str(directory), scheduler, "CPU")
        self._next_id = 0

    def run(self, jobs: list[tuple[list[int], int]], concurrency: int) -> list[dict[str, Any]]:
        """Times of each job, in seconds of one clock; ``concurrency`` are in flight as long as there are jobs."""
        outcomes: list[dict[str, Any]] = [{} for _ in jobs]
        waiting = list(range(len(jobs)))[::-1]
        live: dict[int, Any] = {}
        while waiting or live:
            while waiting and len(live) < concurrency:
                number = waiting.pop()
                outcomes[number] = {"sent_s": time.perf_counter(), "token_s": []}
                live[number] = self._add(*jobs[number])
            self._pipeline.step()
            now = time.perf_counter()
            for number, handle in list(live.items()):
                outcomes[number]["token_s"] += [now] * _num_new(handle)
                if len(outcomes[number]["token_s"]) >= jobs[number][1]:
                    del live[number]
                elif not self._pipeline.has_non_finished_requests():
                    raise RuntimeError(f"request {number} ended after {len(outcomes[number]['token_s'])} tokens")
        return outcomes

    def _add(self, ids: list[int], num_output: int) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = num_output
        config.ignore_eos = True
        config.do_sample = False
        self._next_id += 1
        prompt = self._openvino.Tensor(self._numpy.array([ids], dtype=self._numpy.int64))
        return self._pipeline.add_request(self._next_id, prompt, config)


def _num_new(handle: Any) -> int:
    return sum(len(output.generated_ids) for output in handle.read().values()) if handle.can_read() else 0


def main() -> None:
    pipeline = Pipeline(Path(sys.argv[1]))
    pipeline.run([(list(range(100, 140)), _WARMUP)], 1)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        wanted = json.loads(line)
        outcomes = pipeline.run([(ids, num) for ids, num in wanted["jobs"]], wanted["concurrency"])
        print(json.dumps({"outcomes": outcomes}), flush=True)


if __name__ == "__main__":
    main()
