"""What the whole is for: many real clients, the real model, and each answer as if it had been asked alone."""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from openai import AsyncOpenAI
from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

from common.telemetry.trace_ids import trace_id_of
from common.transport import EmbeddedServer, EmbeddedSettings
from tests.demo_model import demo_model_dir
from tests.integration.serve.served import ROOT, Served, eventually
from tests.servers import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(900)]

_STREAMS = 64
_TOPICS = ("rivers", "stones", "the moon", "bread", "a long walk", "colours", "an old ship", "numbers like 12 and 345")


@dataclass(frozen=True)
class Ask:
    """One client's request. ``leave_after``: chunks after which it hangs up, None to read to the end."""

    prompt: str
    max_tokens: int
    leave_after: int | None


def asks() -> list[Ask]:
    rng = random.Random(11)
    every = []
    for i in range(_STREAMS):
        padding = " ".join(rng.choice(_TOPICS) for _ in range(rng.choice((0, 3, 40, 150))))
        leave = rng.randrange(1, 6) if i % 2 else None
        prompt = f"{i}: Tell me about {rng.choice(_TOPICS)}. {padding}"
        every.append(Ask(prompt, rng.choice((1, 7, 24, 40)) if leave is None else 200, leave))
    return every


def metric(served: Served, name: str) -> float:
    with urllib.request.urlopen(f"{served.facts()['url']}/metrics", timeout=60) as answer:
        page = answer.read().decode()
    values = re.findall(rf"^{re.escape(name)}(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
    assert values, f"{name} is not on the page"
    return sum(map(float, values))


async def stream(client: AsyncOpenAI, ask: Ask) -> str:
    text, seen = "", 0
    answer = await client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": ask.prompt}],
        max_tokens=ask.max_tokens,
        temperature=0,
        stream=True,
    )
    async with answer as chunks:
        async for chunk in chunks:
            text += chunk.choices[0].delta.content or ""
            seen += 1
            if seen == ask.leave_after:
                break
    return text


@pytest.fixture(scope="module")
def otlp_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, otlp_port: int) -> Iterator[Served]:
    served = Served(
        tmp_path_factory.mktemp("acceptance") / "state", str(demo_model_dir()), "--served-model-name", "demo",
        "--host", "127.0.0.1", "--port", "0", "--dtype", "float32", "--quantization", "none",
        "--kv-cache-memory-bytes", str(1 << 30), "--drain-notice-s", "0.1",
        "--otlp-endpoint", f"http://127.0.0.1:{otlp_port}",
    )  # fmt: skip
    try:
        served.facts()
        yield served
    finally:
        served.process.terminate()
        served.process.wait(180)


@pytest.fixture
async def client(served: Served) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{served.facts()['url']}/v1", api_key="none", max_retries=0) as opened:
        yield opened


async def test_64_streams_get_the_text_they_would_get_alone_while_half_the_clients_hang_up(
    served: Served, client: AsyncOpenAI
) -> None:
    every = asks()
    together = await asyncio.gather(*(stream(client, ask) for ask in every))
    stayed = [(ask, text) for ask, text in zip(every, together, strict=True) if ask.leave_after is None]
    for ask, text in stayed:
        assert text == await stream(client, ask), ask.prompt
    eventually(
        lambda: all(
            metric(served, f"vllm:{name}") == 0
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        ),
        lambda: "requests of clients that hung up still run",
    )
    assert metric(served, "vllm:request_success_total") >= len(stayed)


async def test_one_trace_shows_a_request_over_edge_queue_and_worker(client: AsyncOpenAI, otlp_port: int) -> None:
    receiver = OtelTapHttpProtobufReceiver(OtelTapHttpProtobufReceiverSettings(http_port=otlp_port))
    async with receiver:
        arrived: list[Any] = []
        collecting = asyncio.create_task(collect(receiver, arrived))
        raw = await client.chat.completions.with_raw_response.create(
            model="demo", messages=[{"role": "user", "content": "Say hello."}], max_tokens=5, temperature=0
        )
        request_id = raw.headers["x-request-id"]
        spans = await spans_of(f"{trace_id_of(request_id):032x}", arrived)
        collecting.cancel()
    (root,) = [span for span in spans.values() if not span["parent"]]
    assert root["name"] == "POST /v1/chat/completions"
    for name in ("validate", "render", "submit", "relay"):
        assert spans[name]["parent"] == root["id"], name
    assert spans["process request"]["parent"] == spans["submit"]["id"]
    for name in ("queue", "prefill", "decode", "publish"):
        assert spans[name]["parent"] == spans["process request"]["id"], name
    assert root["attributes"]["request.id"] == request_id
    assert spans["process request"]["attributes"]["request.id"] == request_id
    assert spans["process request"]["attributes"]["gen_ai.usage.output_tokens"] == raw.parse().usage.completion_tokens  # type: ignore[union-attr]
    for span in spans.values():
        assert span["start"] <= span["end"]


async def test_a_request_is_inspected_and_replayed_from_its_events_alone(served: Served, client: AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="demo",
        messages=[{"role": "user", "content": "Tell me about rivers."}],
        max_tokens=24,
        temperature=0.9,
        seed=7,
    )
    request_id, text = raw.headers["x-request-id"], raw.parse().choices[0].message.content or "?"
    served.process.terminate()  # the rest needs neither workers nor edges
    served.process.wait(180)
    log = EmbeddedServer.start(EmbeddedSettings(data_dir=served.state_dir / "log"))
    try:
        environ = {**os.environ, "HEADRACE_REDIS_URL": log.url}
        shown = await headrace(environ, "inspect", request_id)
        assert "first token" in shown
        assert shown.rstrip("\n").endswith(text)
        exact = ("--dtype", "float32", "--quantization", "none", "--kv-cache-memory-bytes", str(1 << 30))
        replayed = await headrace(environ, "replay", request_id, str(demo_model_dir()), *exact)
        assert "the same as recorded" in replayed
        assert "identical: 24 tokens in 1 choice" in replayed
    finally:
        log.stop()


async def headrace(environ: dict[str, str], *argv: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli", *argv, stdout=asyncio.subprocess.PIPE, env=environ, cwd=ROOT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


_SPANS = {"validate", "render", "submit", "relay", "process request", "queue", "prefill", "decode", "publish"}


async def collect(receiver: OtelTapHttpProtobufReceiver, arrived: list[Any]) -> None:
    """Keep every span from now on: the receiver forgets what nobody waits for."""
    async for span in receiver.stream_traces():
        arrived.append(span)


async def spans_of(trace_id: str, arrived: list[Any]) -> dict[str, dict[str, Any]]:
    """The spans of one trace by name, once the whole tree is there; each process sends its own, in batches."""
    for _ in range(1200):
        found = {
            span.name: {
                "name": span.name,
                "id": _hex(span.span_id),
                "parent": _hex(span.parent_span_id),
                "attributes": {item.key: _value(item.value) for item in span.attributes},
                "start": span.start_time_unix_nano,
                "end": span.end_time_unix_nano,
            }
            for span in arrived
            if _hex(span.trace_id) == trace_id
        }
        if set(found) >= _SPANS and any(not span["parent"] for span in found.values()):
            return found
        await asyncio.sleep(0.1)
    raise AssertionError(f"of the spans {sorted(_SPANS)} only {sorted(found)} arrived")


def _hex(value: bytes | str) -> str:
    return value if isinstance(value, str) else value.hex()


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind else None
