"""The load generator against a small real HTTP server whose pace is known."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from pydantic import SecretStr

from cli.bench.figures import Objective, Outcome, percentile, summarise
from cli.bench.report import table, timeline_svg
from cli.bench.serve import BenchServeSettings, run
from cli.bench.workload import Lengths, Prose, arrivals
from common.errors import ConfigError

_SEEN = web.AppKey("seen", list[dict[str, object]])


async def _chat(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    request.app[_SEEN].append(body)
    if "fail" in body.get("user", ""):
        raise web.HTTPServiceUnavailable(text="full")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    prompt_tokens = 3 + sum(len(message["content"].split()) for message in body["messages"])
    chunks: list[object] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
    chunks += [{"choices": [{"delta": {"content": f"w{i} "}}]} for i in range(body["max_tokens"])]
    chunks += [{"choices": [{"delta": {}, "finish_reason": "length"}]}]
    chunks += [{"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": body["max_tokens"]}}]
    for chunk in chunks:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await asyncio.sleep(0.001)
    await response.write(b"data: [DONE]\n\n")
    return response


async def _models(_request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "tiny"}]})


@pytest.fixture
async def server() -> AsyncIterator[tuple[str, list[dict[str, object]]]]:
    app = web.Application()
    app[_SEEN] = []
    app.add_routes([web.post("/v1/chat/completions", _chat), web.get("/v1/models", _models)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield f"http://{host}:{port}/v1", app[_SEEN]
    await runner.cleanup()


async def test_a_closed_loop_counts_what_the_server_says(server: tuple[str, list[dict[str, object]]]) -> None:
    url, seen = server
    settings = BenchServeSettings(url=url, requests=6, concurrency=3, warmup_requests=2, output_tokens="5")
    figures, outcomes, target = await run(settings)
    assert target.model == "tiny"
    assert (figures.num_requests, figures.num_errors, figures.output_tokens_mean) == (6, 0, 5)
    assert figures.tokens_per_chunk == pytest.approx(1.0)
    assert all(o.finish_reason == "length" and len(o.gaps_s) == 4 for o in outcomes)
    assert len(seen) == 2 + 2 + 6  # calibration, warm-up, measured
    assert all(body["ignore_eos"] is True for body in seen)
    assert "TTFT ms" in table("t", figures)
    assert timeline_svg("t", outcomes).count("<rect") == 12


async def test_an_open_loop_sends_at_the_rate_and_failures_are_counted(
    server: tuple[str, list[dict[str, object]]],
) -> None:
    url, _ = server
    settings = BenchServeSettings(url=url, requests=10, rate=100.0, warmup_requests=0, output_tokens="2")
    figures, outcomes, _ = await run(settings)
    assert figures.num_errors == 0
    assert [o.sent_s for o in outcomes] == sorted(o.sent_s for o in outcomes)
    with pytest.raises(ConfigError, match="HTTP 503"):
        await run(settings.model_copy(update={"extra_body": {"user": "fail"}}))


async def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9"):
        await run(BenchServeSettings(url="http://127.0.0.1:9/v1"))


def test_the_same_seed_gives_the_same_prompts() -> None:
    prose = Prose()
    assert prose.cut(random.Random(3), 50) == prose.cut(random.Random(3), 50)
    assert prose.cut(random.Random(3), 50) != prose.cut(random.Random(4), 50)


def test_a_corpus_without_prose_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("too short")
    with pytest.raises(ConfigError, match="corpus"):
        Prose(corpus=tmp_path / "short.txt")


@pytest.mark.parametrize(("text", "low", "high"), [("128", 128, 128), ("4-9", 4, 9), ("1,5,3", 1, 5)])
def test_lengths_stay_within_their_distribution(text: str, low: int, high: int) -> None:
    rng = random.Random(0)
    drawn = {Lengths.parse(text).draw(rng) for _ in range(200)}
    assert min(drawn) == low
    assert max(drawn) == high


@pytest.mark.parametrize("text", ["", "0", "9-4", "a", "1-"])
def test_lengths_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Lengths.parse(text)


def test_arrivals_have_the_rate_asked_for() -> None:
    times = arrivals(random.Random(0), 5000, 20.0)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert 5000 / times[-1] == pytest.approx(20.0, rel=0.05)


def test_percentiles_interpolate() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([7.0], 99) == 7.0


def test_goodput_counts_only_requests_within_every_bound() -> None:
    fast = Outcome(0.0, first_s=0.1, last_s=0.5, ended_s=0.5, output_tokens=5, finish_reason="stop")
    slow = Outcome(0.0, first_s=0.9, last_s=1.0, ended_s=1.0, output_tokens=2, finish_reason="stop")
    broken = Outcome(0.0, ended_s=0.2, error="HTTP 500")
    figures = summarise([fast, slow, broken], Objective(ttft_s=0.5))
    assert figures.goodput_per_s == pytest.approx(1.0)
    assert figures.requests_per_s == pytest.approx(2.0)
    assert figures.errors == {"HTTP 500": 1}


@pytest.mark.parametrize(
    ("status", "key", "message"),
    [
        (401, "", "bench_api_key: {url} answers 401: a key is needed (--api-key)"),
        (401, "wrong", "bench_api_key: {url} answers 401: the key is refused (--api-key)"),
        (404, "", "url: {url} does not list its models: HTTP 404"),
    ],
)
async def test_a_server_that_does_not_list_its_models_is_told_with_its_reason(
    status: int, key: str, message: str
) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=status)

    application = web.Application()
    application.router.add_get("/v1/models", refuse)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        with pytest.raises(ConfigError) as caught:
            await run(BenchServeSettings(url=url, bench_api_key=SecretStr(key)))
    finally:
        await runner.cleanup()
    assert caught.value.message == message.format(url=url)
