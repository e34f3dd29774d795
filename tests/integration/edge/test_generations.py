"""Answers through the real SDK and as bytes on the wire: both endpoints, streamed and whole, and how they fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest

from tests.integration.edge import letters_model
from tests.integration.edge.letters_model import answer
from tests.integration.edge.running_edge import FAST, ThreadedEdge
from tests.integration.edge.scripted_worker import ScriptedWorker
from tests.integration.edge.wire import CHAT, COMPLETIONS, body, chunks_of, post, read_to, rest, send

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def sdk(edge: ThreadedEdge) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


async def test_a_chat_answer(sdk: openai.AsyncOpenAI) -> None:
    got = await sdk.chat.completions.create(model=letters_model.NAME, messages=MESSAGES, max_tokens=30)
    assert got.choices[0].message.content == answer(30)
    assert got.choices[0].finish_reason == "length"
    assert got.usage is not None
    assert got.usage.completion_tokens == 30


async def test_a_chat_stream(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model=letters_model.NAME,
        messages=MESSAGES,
        max_tokens=30,
        stream=True,
        stream_options={"include_usage": True},
    )
    got = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in got if c.choices) == answer(30)
    assert [c.choices[0].finish_reason for c in got if c.choices and c.choices[0].finish_reason] == ["length"]
    assert got[-1].usage is not None
    assert got[-1].usage.completion_tokens == 30
    assert len({chunk.id for chunk in got}) == 1


async def test_a_completion_whole_and_streamed(sdk: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {"model": letters_model.NAME, "prompt": "hello", "max_tokens": 12}
    whole = await sdk.completions.create(**asked)
    streamed = [chunk async for chunk in await sdk.completions.create(**asked, stream=True)]
    assert whole.choices[0].text == answer(12)
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer(12)


async def test_several_choices_of_several_prompts(sdk: openai.AsyncOpenAI) -> None:
    got = await sdk.completions.create(model=letters_model.NAME, prompt=["a", "b"], n=2, max_tokens=3)
    assert [(choice.index, choice.text) for choice in got.choices] == [(i, "abc") for i in range(4)]


async def test_the_bare_stream_byte_by_byte(edge: ThreadedEdge, worker: ScriptedWorker) -> None:
    raw = await post(edge, CHAT, body(max_tokens=3, stream=True))
    head, _, stream = raw.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert lines[0] == b"http/1.1 200 ok"
    for header in (
        b"content-type: text/event-stream; charset=utf-8",
        b"cache-control: no-cache",
        b"x-accel-buffering: no",
    ):
        assert header in lines
    text = chunks_of(stream)
    assert b"\r" not in text
    blocks = text.split(b"\n\n")
    assert blocks[-2:] == [b"data: [DONE]", b""]
    assert all(block.startswith(b"data: {") and b"\n" not in block for block in blocks[:-2])
    first = json.loads(blocks[0][6:])
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}


async def test_a_keep_alive_on_a_bare_stream_is_a_block_of_its_own(
    edge_that_pings: ThreadedEdge, worker: ScriptedWorker
) -> None:
    worker.steps.clear()
    connection = await send(edge_that_pings, CHAT, body(max_tokens=2, stream=True))
    start = await read_to(connection, b": ping\n")
    worker.steps.set()
    text = chunks_of((start + await rest(connection)).partition(b"\r\n\r\n")[2])
    assert text.startswith(b": ping\n\n")
    assert b"id:" not in text
    assert text.endswith(b"data: [DONE]\n\n")


async def test_a_keep_alive_on_a_stream_with_ids_is_one_line(
    edge_that_pings: ThreadedEdge, worker: ScriptedWorker
) -> None:
    worker.steps.clear()
    connection = await send(edge_that_pings, CHAT, body(max_tokens=2, stream=True), {"X-Headrace-Resumable": "1"})
    start = await read_to(connection, b": ping\n")
    worker.steps.set()
    text = chunks_of((start + await rest(connection)).partition(b"\r\n\r\n")[2])
    assert text.startswith(b": ping\n")
    for block in text.split(b"\n\n")[:-1]:
        lines = block.split(b"\n")
        while lines[0] == b": ping":
            lines.pop(0)
        assert [line.partition(b":")[0] for line in lines] == [b"id", b"data"]


async def test_the_real_sdk_reads_a_stream_with_ids_and_pings(
    edge_that_pings: ThreadedEdge, worker: ScriptedWorker
) -> None:
    worker.step_s = 0.2
    async with openai.AsyncOpenAI(base_url=f"{edge_that_pings.url}/v1", api_key="none", timeout=120) as sdk:
        stream = await sdk.chat.completions.create(
            model=letters_model.NAME,
            messages=MESSAGES,
            max_tokens=5,
            stream=True,
            extra_headers={"X-Headrace-Resumable": "1"},
        )
        assert "".join([c.choices[0].delta.content or "" async for c in stream if c.choices]) == answer(5)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_failure_before_any_output_is_an_http_error(
    make_edge: Callable[..., ThreadedEdge], stream: bool
) -> None:
    patient = FAST.model_copy(update={"first_frame_hold_s": 60.0})
    edge = await asyncio.to_thread(make_edge(streams=patient).start)
    failing: list[Any] = [{"role": "user", "content": "FAIL-NOW"}]
    async with openai.AsyncOpenAI(base_url=f"{edge.url}/v1", api_key="none", max_retries=0) as sdk:
        with pytest.raises(openai.InternalServerError, match="the script says so") as caught:
            await sdk.chat.completions.create(model=letters_model.NAME, messages=failing, max_tokens=5, stream=stream)
    assert caught.value.code == "engine_error"
    assert caught.value.request_id


async def test_a_failure_in_mid_stream_is_an_error_chunk(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model=letters_model.NAME, messages=[{"role": "user", "content": "FAIL-LATER"}], max_tokens=9, stream=True
    )
    text: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            text.append(chunk.choices[0].delta.content or "")

    with pytest.raises(openai.APIError, match="the script says so"):
        await read()
    assert "".join(text) == "abc"


async def test_the_same_label_on_two_live_requests_does_no_harm(edge: ThreadedEdge) -> None:
    async with httpx.AsyncClient(base_url=edge.url, timeout=120) as client:
        asked = [client.post(CHAT, json=body(max_tokens=20), headers={"X-Request-Id": "same"}) for _ in range(4)]
        answers = await asyncio.gather(*asked)
    assert [a.json()["choices"][0]["message"]["content"] for a in answers] == [answer(20)] * 4
    assert {a.headers["x-request-id"] for a in answers} == {"same"}
    assert len({a.headers["x-headrace-request-id"] for a in answers}) == 4
    assert len({a.json()["id"] for a in answers}) == 4


async def test_many_streams_at_once_each_get_their_own(sdk: openai.AsyncOpenAI) -> None:
    async def one(i: int) -> str:
        stream = await sdk.chat.completions.create(
            model=letters_model.NAME, messages=MESSAGES, max_tokens=20 + i, stream=True
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

    assert await asyncio.gather(*(one(i) for i in range(64))) == [answer(20 + i) for i in range(64)]


async def test_tokens_are_counted_and_spelled(edge: ThreadedEdge) -> None:
    async with httpx.AsyncClient(base_url=edge.url, timeout=120) as client:
        got = (await client.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True})).json()
        back = (await client.post("/detokenize", json={"tokens": got["tokens"]})).json()
        about = (await client.get("/tokenizer_info")).json()
    assert (got["count"], got["max_model_len"], back["prompt"]) == (6, letters_model.MAX_MODEL_LEN, "héllo")
    assert about["eos_token"] == letters_model.END


async def test_metrics_tell_of_generations(edge: ThreadedEdge) -> None:
    lines = (
        'headrace_edge_requests_total{endpoint="chat",model="letters",outcome="ok"} 1.0',
        'headrace_edge_requests_total{endpoint="completion",model="letters",outcome="ok"} 1.0',
        'headrace_edge_delivered_tokens_total{model="letters"} 14.0',
        'headrace_edge_time_to_first_token_seconds_count{model="letters"} 2.0',
        "headrace_edge_requests_in_flight 0.0",
        'headrace_queue_depth{model="letters"} 0.0',
    )
    async with httpx.AsyncClient(base_url=edge.url, timeout=120) as client:
        await client.post(CHAT, json=body(max_tokens=7))
        await client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 7, "stream": True})
        for _ in range(600):  # what is counted after the last byte, and figures of the queue, come later
            page = (await client.get("/metrics")).text
            missing = [line for line in lines if line not in page]
            if not missing:
                break
            await asyncio.sleep(0.1)
    assert not missing
