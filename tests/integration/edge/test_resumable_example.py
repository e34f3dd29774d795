"""The client helper of the documentation, against edges that die."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError

from common.transport import RedisSettings
from examples.resumable import ResumableChat
from tests.integration.edge.letters_model import NAME, answer
from tests.integration.edge.running_edge import EdgeProcess, ThreadedEdge
from tests.integration.edge.scripted_worker import ScriptedWorker
from tests.servers import free_port

HELPER = Path(__file__).parents[3] / "examples" / "resumable.mjs"
MESSAGES = [{"role": "user", "content": "abc"}]


async def test_an_answer_goes_on_at_another_edge_when_one_is_killed(
    redis_settings: RedisSettings, edge: ThreadedEdge, worker: ScriptedWorker
) -> None:
    worker.step_s = 0.01
    victim = EdgeProcess(redis_settings)
    await asyncio.to_thread(victim.start)
    chat = ResumableChat([f"{victim.url}/v1", f"{edge.url}/v1"])
    chunks = []
    async for chunk in chat.stream(model=NAME, messages=MESSAGES, max_tokens=120):
        chunks.append(chunk)
        if len(chunks) == 20:
            victim.kill()
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == answer(120)
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert len({c.id for c in chunks}) == 1


async def test_a_mistake_in_the_request_is_raised_at_once(edge: ThreadedEdge) -> None:
    chat = ResumableChat([f"{edge.url}/v1"])
    with pytest.raises(APIError, match="temperature"):
        await anext(chat.stream(model=NAME, messages=MESSAGES, temperature=9))


async def test_edges_that_are_not_there_are_given_up_after_the_attempts(make_edge: Callable[..., Any]) -> None:
    chat = ResumableChat([f"http://127.0.0.1:{free_port()}/v1"], max_attempts=2)
    with pytest.raises(httpx.ConnectError):
        await anext(chat.stream(model=NAME, messages=MESSAGES))


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on PATH")
async def test_the_browser_s_helper_goes_on_at_another_edge(
    redis_settings: RedisSettings, edge: ThreadedEdge, worker: ScriptedWorker, tmp_path: Path
) -> None:
    worker.step_s = 0.01
    victim = EdgeProcess(redis_settings)
    await asyncio.to_thread(victim.start)
    program = tmp_path / "read.mjs"
    urls = json.dumps([f"{victim.url}/v1", f"{edge.url}/v1"])
    request = json.dumps({"model": NAME, "messages": MESSAGES, "max_tokens": 120})
    program.write_text(
        f"import {{ resumableChat }} from {json.dumps(str(HELPER))};\n"
        f"for await (const chunk of resumableChat({urls}, {request}))\n"
        "  process.stdout.write(chunk.choices[0]?.delta?.content ?? '');\n"
    )
    (tmp_path / "package.json").write_text("{}")
    node = await asyncio.create_subprocess_exec("node", str(program), stdout=asyncio.subprocess.PIPE)
    assert node.stdout is not None
    begun = await node.stdout.read(10)
    victim.kill()
    text = begun + await node.stdout.read()
    assert await node.wait() == 0
    assert text.decode() == answer(120)
