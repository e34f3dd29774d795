"""An edge that is asked to stop: who can resume goes on at another edge at once, the others are drained."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from common.events import CancelReason
from common.transport import RedisSettings
from examples.resumable import ResumableChat
from tests.integration.edge.letters_model import NAME, answer
from tests.integration.edge.running_edge import EdgeProcess, ThreadedEdge
from tests.integration.edge.scripted_worker import ScriptedWorker
from tests.integration.edge.wire import (
    CHAT,
    body,
    chunks_of,
    events_of,
    get,
    is_complete,
    read_to,
    rest,
    send,
    split,
    text_of,
    until,
)

HELPER = Path(__file__).parents[3] / "examples" / "resumable.mjs"
MESSAGES = [{"role": "user", "content": "abc"}]
RESUMABLE = {"X-Headrace-Resumable": "1"}
MARK = b": headrace resume\n"


@pytest.fixture
async def leaving(redis_settings: RedisSettings, worker: ScriptedWorker) -> AsyncIterator[EdgeProcess]:
    """An edge that may drain for longer than any test waits."""
    edge = EdgeProcess(redis_settings, drain_notice_s=0.0, drain_timeout_s=100.0, first_frame_hold_s=0.5)
    try:
        yield await asyncio.to_thread(edge.start)
    finally:
        edge.kill()


async def test_a_resumable_stream_is_handed_over_at_once_and_loses_nothing(
    leaving: EdgeProcess, edge: ThreadedEdge, worker: ScriptedWorker
) -> None:
    worker.pause_at = 20
    connection = await send(leaving, CHAT, body(max_tokens=60, stream=True), RESUMABLE)
    head = await read_to(connection, b"id: 5\n")
    leaving.terminate()
    _, headers, raw = split(head + await rest(connection))  # before any deadline: the worker stands still
    assert not is_complete(raw), "a clean end would make half an answer look whole"
    assert MARK in raw
    assert b"[DONE]" not in raw
    assert b"error" not in raw
    status, log = await asyncio.to_thread(leaving.wait)
    assert status == 0, log
    assert '"outcome":"handed_over"' in log
    assert "Traceback" not in log
    assert '"level":"error"' not in log
    (request_id,) = worker.running
    assert worker.ended == {}
    worker.pause_at = None
    seen = [event for event in events_of(chunks_of(raw)) if event[0]]
    path = f"/v1/streams/{headers['x-headrace-request-id']}"
    seen += events_of(chunks_of(split(await get(edge, path, {"Last-Event-ID": seen[-1][0]}))[2]))
    assert text_of(seen) == answer(60)
    assert worker.ended == {request_id: None}


async def test_the_helper_goes_on_at_another_edge_by_itself(
    leaving: EdgeProcess, edge: ThreadedEdge, worker: ScriptedWorker
) -> None:
    worker.pause_at = 30
    chat = ResumableChat([f"{leaving.url}/v1", f"{edge.url}/v1"], max_attempts=1)  # no connection may fail
    chunks = []
    async for chunk in chat.stream(model=NAME, messages=MESSAGES, max_tokens=60):
        chunks.append(chunk)
        if len(chunks) == 20:
            leaving.terminate()
            await asyncio.to_thread(leaving.wait)
            worker.pause_at = None
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer(60)
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert len(worker.seen) == 1


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on PATH")
async def test_the_browser_s_helper_goes_on_at_another_edge_by_itself(
    leaving: EdgeProcess, edge: ThreadedEdge, worker: ScriptedWorker, tmp_path: Path
) -> None:
    worker.pause_at = 60
    program = tmp_path / "read.mjs"
    urls = json.dumps([f"{leaving.url}/v1", f"{edge.url}/v1"])
    request = json.dumps({"model": NAME, "messages": MESSAGES, "max_tokens": 120})
    program.write_text(
        f"import {{ resumableChat }} from {json.dumps(str(HELPER))};\n"
        f"for await (const chunk of resumableChat({urls}, {request}, {{ maxAttempts: 1 }}))\n"
        "  process.stdout.write(chunk.choices[0]?.delta?.content ?? '');\n"
    )
    (tmp_path / "package.json").write_text("{}")
    node = await asyncio.create_subprocess_exec("node", str(program), stdout=asyncio.subprocess.PIPE)
    assert node.stdout is not None
    begun = await node.stdout.read(10)
    leaving.terminate()
    await asyncio.to_thread(leaving.wait)
    worker.pause_at = None
    text = begun + await node.stdout.read()
    assert await node.wait() == 0
    assert text.decode() == answer(120)
    assert len(worker.seen) == 1


async def test_an_sdk_that_did_not_ask_sees_only_its_drained_stream(
    leaving: EdgeProcess, worker: ScriptedWorker
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{leaving.url}/v1", api_key="x", max_retries=0) as client:
        worker.pause_at = 20
        stream = await client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=60, stream=True)  # type: ignore[call-overload]
        texts: list[str] = []
        async for chunk in stream:
            if not texts:
                leaving.terminate()
                await _listens_no_more(leaving)
                worker.pause_at = None
            texts.append(chunk.choices[0].delta.content or "")
    assert "".join(texts) == answer(60)
    status, log = await asyncio.to_thread(leaving.wait)
    assert status == 0, log


async def test_an_sdk_that_asked_for_positions_and_cannot_resume_gets_an_error_and_never_half_an_answer(
    leaving: EdgeProcess, worker: ScriptedWorker
) -> None:
    async with openai.AsyncOpenAI(base_url=f"{leaving.url}/v1", api_key="x", max_retries=0) as client:
        worker.pause_at = 20
        stream = await client.chat.completions.create(
            model=NAME, messages=MESSAGES, max_tokens=60, stream=True, extra_headers=RESUMABLE
        )  # type: ignore[call-overload]
        leaving.terminate()
        with pytest.raises((openai.APIError, httpx.TransportError)):
            _ = [chunk async for chunk in stream]
    worker.pause_at = None
    await asyncio.to_thread(leaving.wait)


async def test_a_keyed_stream_without_positions_is_drained(leaving: EdgeProcess, worker: ScriptedWorker) -> None:
    worker.pause_at = 20
    connection = await send(leaving, CHAT, body(max_tokens=60, stream=True), {"Idempotency-Key": "k1"})
    head = await read_to(connection, b"data: ")
    leaving.terminate()
    await _listens_no_more(leaving)
    worker.pause_at = None
    _, _, raw = split(head + await rest(connection))
    assert text_of(events_of(chunks_of(raw))) == answer(60)
    assert raw.rstrip().endswith(b"data: [DONE]\n\n\r\n0")


async def test_a_stream_that_ends_with_its_reader_is_drained_even_if_it_has_positions(
    redis_settings: RedisSettings, worker: ScriptedWorker
) -> None:
    edge = EdgeProcess(redis_settings, drain_notice_s=0.0, drain_timeout_s=0.5, resume_grace_s=0.0)
    try:
        await asyncio.to_thread(edge.start)
        worker.pause_at = 20
        connection = await send(edge, CHAT, body(max_tokens=60, stream=True), RESUMABLE)
        head = await read_to(connection, b"id: 5\n")
        (request_id,) = worker.running
        edge.terminate()
        _, _, raw = split(head + await rest(connection))
        (_, error), (_, done) = events_of(chunks_of(raw))[-2:]
        assert error["error"]["code"] == "draining"
        assert done is None
        await asyncio.to_thread(edge.wait)
        worker.pause_at = None
        await until(lambda: request_id in worker.ended)
        assert worker.ended[request_id] is CancelReason.ORPHANED
    finally:
        edge.kill()


async def test_without_handover_a_resumable_stream_is_finished_like_any_other(
    redis_settings: RedisSettings, worker: ScriptedWorker
) -> None:
    edge = EdgeProcess(redis_settings, drain_notice_s=0.0, drain_timeout_s=100.0, drain_handover=False)
    try:
        await asyncio.to_thread(edge.start)
        worker.pause_at = 20
        connection = await send(edge, CHAT, body(max_tokens=60, stream=True), RESUMABLE)
        head = await read_to(connection, b"id: 5\n")
        edge.terminate()
        await _listens_no_more(edge)
        worker.pause_at = None
        _, _, raw = split(head + await rest(connection))
        assert text_of(events_of(chunks_of(raw))) == answer(60)
        assert MARK not in raw
    finally:
        edge.kill()


async def _listens_no_more(edge: EdgeProcess) -> None:
    async with asyncio.timeout(100):
        for _ in iter(bool, True):
            try:
                async with httpx.AsyncClient(base_url=edge.url) as client:
                    await client.get("/health")
            except httpx.TransportError:
                return
            await asyncio.sleep(0.05)
