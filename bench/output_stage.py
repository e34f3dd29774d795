"""What a token costs after it was drawn: detokenise, stop strings, events, append.

    python -m bench.output_stage [--sequences 64] [--steps 500] [--redis redis://...]

Prints CPU microseconds a token of this process (the I/O thread's share of a worker), in memory and against a server.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cli.bench.step import TakesAll
from common.events import EngineRequest, FinishReason, SamplingParams, TokenLogprobs
from common.telemetry.metrics import WorkerMetrics
from common.telemetry.tracing import Tracing
from common.tokenization.tokenizer import Tokenizer
from common.transport import (
    AdmissionLimits,
    EmbeddedServer,
    EmbeddedSettings,
    LogClient,
    Owned,
    Ownership,
    RedisSettings,
    Submission,
    new_request_id,
)
from engine_worker.handoff import Commands, StepReports
from engine_worker.output_stage import Log, OutputStage
from engine_worker.reporting import Reporting
from engine_worker.resume import Resumer
from engine_worker.sequence import Sequence as EngineSequence
from engine_worker.step import SampledToken, StepResult
from tests.demo_model import demo_model_dir

MODEL = "bench"


@dataclass(frozen=True)
class Case:
    name: str
    stop: tuple[str, ...] = ()
    logprobs: int | None = None


CASES = (
    Case("plain"),
    Case("four stop strings", stop=("\n\nHuman:", "</answer>", "###", "<|stop|>")),
    Case("five top logprobs", logprobs=5),
)


def requests(case: Case, ids: Sequence[str], steps: int) -> list[EngineRequest]:
    sampling = SamplingParams(max_tokens=steps + 1, stop=case.stop, logprobs=case.logprobs)
    return [EngineRequest(request_id=i, model=MODEL, prompts=((1, 2, 3),), sampling=sampling) for i in ids]


def text_tokens(tokenizer: Tokenizer) -> list[int]:
    """Tokens of ordinary text, so that pieces, spaces and now and then a split character come as they do."""
    text = (
        "The quick brown fox jumps over the lazy dog. Naïve cafés serve 漢字 and 🦊 at #3 </ans> now and then.\n" * 20
    )
    return tokenizer.encode(text)


async def measure(
    case: Case, stage: OutputStage, reports: StepReports, sequences: list[EngineSequence], steps: int, tokens: list[int]
) -> tuple[float, float]:
    """(CPU seconds, wall seconds) of ``steps`` steps, one append each."""
    scores = TokenLogprobs(logprob=-1.0, rank=1, top_ids=(1, 2, 3, 4, 5), top_logprobs=(-1.0, -2.0, -3.0, -4.0, -5.0))
    rng = random.Random(1)
    offsets = [rng.randrange(len(tokens)) for _ in sequences]
    stage.stop()  # so that run() writes what there is and returns
    await stage.run()
    cpu, wall = time.process_time(), time.perf_counter()
    for step in range(steps):
        sampled = tuple(
            SampledToken(s, tokens[(offset + step) % len(tokens)], scores if case.logprobs is not None else None)
            for s, offset in zip(sequences, offsets, strict=True)
        )
        reports.put(StepResult(step=step, t=time.time(), sampled=sampled))
        await stage.run()
    spent = time.process_time() - cpu, time.perf_counter() - wall
    for s in sequences:
        s.finish_reason = FinishReason.LENGTH
    reports.put(StepResult(step=steps, t=time.time(), finished=tuple(sequences)))
    await stage.run()
    assert not stage.live
    return spent


async def bench(case: Case, log: Log, owned: list[Owned], steps: int, tokenizer: Tokenizer) -> None:
    reports = StepReports(10_000)
    metrics = Reporting(WorkerMetrics(MODEL), Tracing.off(), "bench")
    stage = OutputStage(log, Commands(), reports, metrics)
    resumer = Resumer(tokenizer, "bench", 1 << 20, iter(range(1, 1 << 30)).__next__)
    sequences: list[EngineSequence] = []
    for one in owned:
        resumed = resumer.resume(one, time.time())
        stage.adopt(resumed)
        sequences += resumed.sequences
    cpu, wall = await measure(case, stage, reports, sequences, steps, text_tokens(tokenizer))
    count = steps * len(sequences)
    where = "in memory" if isinstance(log, TakesAll) else "with server"
    print(f"{case.name:20} {where:12} {cpu / count * 1e6:7.2f} us CPU/token  {wall / steps * 1e3:7.2f} ms/step")


async def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--redis", default="", help="default: an embedded server in a new directory under build/")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_json((demo_model_dir() / "tokenizer.json").read_bytes())
    for case in CASES:
        ids = [f"0-{i}" for i in range(arguments.sequences)]
        owned = [Owned(r, 1, 0, (), None, 0, 0.0) for r in requests(case, ids, arguments.steps)]
        await bench(case, TakesAll(), owned, arguments.steps, tokenizer)
    server = None if arguments.redis else EmbeddedServer.start(EmbeddedSettings(data_dir="build/bench-output-stage"))
    try:
        url = arguments.redis or (server.url if server else "")
        client = await LogClient.open(RedisSettings(redis_url=url, partitions=1))
        for case in CASES:
            await with_server(case, client, arguments.sequences, arguments.steps, tokenizer)
        await client.close()
    finally:
        if server is not None:
            server.stop()


async def with_server(case: Case, client: LogClient, sequences: int, steps: int, tokenizer: Tokenizer) -> None:
    lease = client.lease("bench", 600.0)
    lease.renew()
    ownership = Ownership(client, model=MODEL, lease=lease)
    await ownership.ensure_groups()
    submission, plenty = Submission(client), AdmissionLimits(max_requests=1 << 30, max_tokens=1 << 50)
    for request in requests(case, [new_request_id(1) for _ in range(sequences)], steps):
        await submission.submit(request, body_fingerprint="", limits=plenty, edge_id="edge", grace_s=600.0)
    await bench(case, ownership, await ownership.claim(sequences), steps, tokenizer)
    lease.release()
    lease.close()


if __name__ == "__main__":
    asyncio.run(main())
