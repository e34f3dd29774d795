"""``headrace bench serve``: load a server that speaks the OpenAI API, and say how it did.

Closed loop (a fixed number of requests in flight) or open loop (requests arrive at a rate, whatever the server does).
Prompts are slices of real prose, chosen by the seed: the same seed sends the same requests, another seed finds nothing
in a prefix cache but what is shared on purpose.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import aiohttp
from pydantic import Field, SecretStr, field_validator

from cli.bench.client import Target, send
from cli.bench.figures import Figures, Objective, Outcome, summarise
from cli.bench.report import table, timeline_svg
from cli.bench.workload import WORKLOADS, Job, Lengths, Prose, WorkloadName, arrivals
from common.config import Flags, Settings, load
from common.errors import ConfigError


class BenchServeSettings(Settings):
    """Which load is put on which server."""

    url: Annotated[str, Flags(positional=True)] = Field(
        "http://127.0.0.1:8000/v1", description="Base URL of the API, with its /v1."
    )
    bench_model: Annotated[str, Flags(("--model",))] = Field("", description="Model name; empty: the first one listed.")
    bench_api_key: Annotated[SecretStr, Flags(("--api-key",))] = Field(SecretStr(""), description="Bearer token.")
    endpoint: Literal["chat", "completions"] = Field("chat", description="Which endpoint is called.")
    workload: Literal["", WorkloadName] = Field(
        "", description="A to E: concurrency, requests and lengths of docs/benchmarks.md in place of those below."
    )
    concurrency: int = Field(8, ge=1, le=10_000, description="Requests in flight in a closed loop.")
    rate: float = Field(0.0, ge=0, description="Requests a second in an open loop; 0: closed loop.")
    burstiness: float = Field(1.0, gt=0, description="Shape of the gaps between arrivals: 1 Poisson, below 1 bursts.")
    requests: int = Field(64, ge=1, le=1_000_000, description="Requests that are measured.")
    warmup_requests: int = Field(4, ge=0, description="Requests before the measured ones.")
    prompt_tokens: str = Field("128", description="Prompt length: 128, 64-256 (uniform) or 16,128,1024 (one of these).")
    output_tokens: str = Field("128", description="Output length, in the same forms.")
    system_tokens: int = Field(0, ge=0, description="Length of a system prompt that all requests share.")
    bench_tokenizer: Annotated[Path | None, Flags(("--tokenizer",))] = Field(
        None, description="tokenizer.json of the model, for exact prompt lengths."
    )
    corpus: Path | None = Field(None, description="Text file that prompts are cut from.")
    bench_temperature: Annotated[float, Flags(("--temperature",))] = Field(0.0, ge=0, le=2, description="Temperature.")
    bench_seed: Annotated[int, Flags(("--seed",))] = Field(1, description="Chooses prompts, lengths and arrivals.")
    extra_body: dict[str, Any] = Field(
        default_factory=lambda: {"ignore_eos": True}, description="JSON object that is merged into every request."
    )
    slo_ttft_ms: float = Field(0.0, ge=0, description="Goodput: bound on the time to first token; 0: none.")
    slo_tpot_ms: float = Field(0.0, ge=0, description="Goodput: bound on the time per output token; 0: none.")
    slo_e2e_ms: float = Field(0.0, ge=0, description="Goodput: bound on the whole request; 0: none.")
    request_timeout_s: float = Field(600.0, gt=0, description="A request that takes longer has failed.")
    json_file: Annotated[Path | None, Flags(("--json",))] = Field(None, description="Write figures and requests here.")
    plot_file: Annotated[Path | None, Flags(("--plot",))] = Field(None, description="Write a timeline (SVG) here.")

    @field_validator("prompt_tokens", "output_tokens")
    @classmethod
    def _check_lengths(cls, value: str) -> str:
        Lengths.parse(value)
        return value

    @field_validator("extra_body", mode="before")
    @classmethod
    def _parse_json(cls, value: object) -> object:
        return json.loads(value) if isinstance(value, str) else value

    @property
    def objective(self) -> Objective:
        ttft, tpot, e2e = (bound / 1000 or None for bound in (self.slo_ttft_ms, self.slo_tpot_ms, self.slo_e2e_ms))
        return Objective(ttft, tpot, e2e)


def main(argv: Sequence[str], prog: str) -> int:
    given = load([BenchServeSettings], argv, prog=prog, description=(__doc__ or "").strip())[BenchServeSettings]
    settings = settled(given)
    figures, outcomes, target = asyncio.run(run(settings))
    title = f"{target.model} at {settings.url}, " + (
        f"{settings.rate:g} requests/s" if settings.rate else f"concurrency {settings.concurrency}"
    )
    print(table(f"{settings.workload} {title}".strip(), figures))
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(_as_json(settings, figures, outcomes), indent=1), encoding="utf-8")
    if settings.plot_file is not None:
        settings.plot_file.write_text(timeline_svg(title, outcomes), encoding="utf-8")
    return 1 if figures.num_errors else 0


def settled(settings: BenchServeSettings) -> BenchServeSettings:
    """``settings`` with those of the named workload, if there is one, in their places."""
    if not settings.workload:
        return settings
    return settings.model_copy(update=asdict(WORKLOADS[settings.workload]))


async def run(settings: BenchServeSettings, *, keep_alive: bool = True) -> tuple[Figures, list[Outcome], Target]:
    """Warm up, send the load, and summarise. Raises `ConfigError` when the server or the model is not there.

    Without ``keep_alive`` each request has a connection of its own.
    """
    rng = random.Random(settings.bench_seed)
    prose = Prose(corpus=settings.corpus, tokenizer=settings.bench_tokenizer)
    timeout = aiohttp.ClientTimeout(total=settings.request_timeout_s, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0, force_close=not keep_alive)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        target = await _find_target(session, settings)
        overhead = await _template_tokens(session, target, prose)
        target = replace(target, system=prose.cut(rng, settings.system_tokens) if settings.system_tokens else "")
        lengths = Lengths.parse(settings.prompt_tokens), Lengths.parse(settings.output_tokens)
        beside = 0 if settings.system_tokens else overhead  # with a system prompt, the length is the user message's

        def job() -> Job:
            return Job(prose.cut(rng, lengths[0].draw(rng) - beside), lengths[1].draw(rng))

        warmup = [job() for _ in range(settings.warmup_requests)]
        jobs = [job() for _ in range(settings.requests)]
        if settings.rate:
            times = arrivals(rng, settings.requests, settings.rate, settings.burstiness)
            jobs = [replace(item, at_s=at) for item, at in zip(jobs, times, strict=True)]
        await _send_all(session, target, warmup, settings.concurrency)
        outcomes = await _send_all(session, target, jobs, settings.concurrency)
    return summarise(outcomes, settings.objective), outcomes, target


async def _find_target(session: aiohttp.ClientSession, settings: BenchServeSettings) -> Target:
    key = settings.bench_api_key.get_secret_value()
    model = settings.bench_model
    if not model:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with session.get(f"{settings.url.rstrip('/')}/models", headers=headers) as response:
                _check_status(response.status, settings)
                listed = (await response.json())["data"]
        except (aiohttp.ClientError, OSError, KeyError, ValueError) as error:
            raise ConfigError(f"url: {settings.url} does not list its models: {error}") from error
        if not listed:
            raise ConfigError(f"url: {settings.url} serves no model")
        model = listed[0]["id"]
    return Target(
        url=settings.url,
        model=model,
        is_chat=settings.endpoint == "chat",
        api_key=key,
        temperature=settings.bench_temperature,
        extra=settings.extra_body,
    )


def _check_status(status: int, settings: BenchServeSettings) -> None:
    """Raises `ConfigError` for an answer that is no list."""
    if status in (401, 403):
        reason = "the key is refused" if settings.bench_api_key.get_secret_value() else "a key is needed"
        raise ConfigError(f"bench_api_key: {settings.url} answers {status}: {reason} (--api-key)")
    if status != 200:
        raise ConfigError(f"url: {settings.url} does not list its models: HTTP {status}")


async def _template_tokens(session: aiohttp.ClientSession, target: Target, prose: Prose) -> int:
    """Tokens the server adds to a prompt (its chat template), by its own count of two prompts."""
    rng = random.Random(-1)
    texts = prose.words(rng, 20), prose.words(rng, 220)
    counts = []
    for text in texts:
        outcome = await send(session, target, text, 2)
        if outcome.error is not None:
            raise ConfigError(f"url: a first request failed: {outcome.error}")
        counts.append(outcome.prompt_tokens)
    if not all(counts):
        return 0
    if not prose.is_exact:
        prose.calibrate((len(texts[1]) - len(texts[0])) / max(1, counts[1] - counts[0]))
    return max(0, counts[0] - prose.count(texts[0]))


async def _send_all(
    session: aiohttp.ClientSession, target: Target, jobs: Sequence[Job], concurrency: int
) -> list[Outcome]:
    gate = asyncio.Semaphore(concurrency)
    start = time.perf_counter()

    async def closed(job: Job) -> Outcome:
        async with gate:
            return await send(session, target, job.prompt, job.output_tokens)

    async def opened(job: Job, at_s: float) -> Outcome:
        await asyncio.sleep(max(0.0, start + at_s - time.perf_counter()))
        return await send(session, target, job.prompt, job.output_tokens)

    return await asyncio.gather(*(closed(job) if job.at_s is None else opened(job, job.at_s) for job in jobs))


def _as_json(settings: BenchServeSettings, figures: Figures, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    start = min(o.sent_s for o in outcomes)
    return {
        "settings": settings.model_dump(mode="json", exclude={"bench_api_key"}),
        "figures": figures.as_json(),
        "requests": [
            {
                "sent_s": o.sent_s - start,
                "ttft_s": o.ttft_s,
                "tpot_s": o.tpot_s,
                "e2e_s": o.ended_s - o.sent_s,
                "prompt_tokens": o.prompt_tokens,
                "cached_tokens": o.cached_tokens,
                "output_tokens": o.output_tokens,
                "error": o.error,
            }
            for o in outcomes
        ],
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], "headrace bench serve"))
