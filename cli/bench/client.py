"""One request against an OpenAI-compatible server, timed as its chunks arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from cli.bench.figures import Outcome


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go and what is in each of them."""

    url: str  # up to and including /v1
    model: str
    is_chat: bool = True
    api_key: str = ""
    system: str = ""
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)  # ignore_eos and the like

    @property
    def endpoint(self) -> str:
        return f"{self.url.rstrip('/')}/{'chat/completions' if self.is_chat else 'completions'}"

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        if self.is_chat:
            system = [{"role": "system", "content": self.system}] if self.system else []
            body["messages"] = [*system, {"role": "user", "content": prompt}]
        else:
            body["prompt"] = f"{self.system}\n{prompt}" if self.system else prompt
        return body


async def send(session: aiohttp.ClientSession, target: Target, prompt: str, max_tokens: int) -> Outcome:
    """Send one streamed request and read it to its end. Whatever goes wrong is in ``Outcome.error``."""
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    outcome = Outcome(time.perf_counter())
    try:
        async with session.post(target.endpoint, json=target.body(prompt, max_tokens), headers=headers) as response:
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            else:
                await _read(response, outcome)
    except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, OSError, msgspec.MsgspecError) as error:
        outcome.error = f"{type(error).__name__}: {error}"[:200]
    outcome.ended_s = time.perf_counter()
    if outcome.error is None and outcome.finish_reason is None:
        outcome.error = "the stream ended without a finish_reason"
    if not outcome.has_usage:
        outcome.output_tokens = outcome.num_chunks
    return outcome


async def _read(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        now = time.perf_counter()
        payload = line[5:].strip()
        if payload == b"[DONE]":
            continue
        chunk = _decode_chunk(payload)
        if chunk.error is not None:
            outcome.error = f"error in the stream: {chunk.error}"[:200]
            return
        if chunk.usage is not None:
            _take_usage(outcome, chunk.usage)
        for choice in chunk.choices:
            outcome.finish_reason = choice.finish_reason or outcome.finish_reason
            if text := _text_of(choice):
                _take_text(outcome, text, now)


def _text_of(choice: _Choice) -> str:
    if choice.delta is None:
        return choice.text or ""
    return choice.delta.content or choice.delta.reasoning or choice.delta.reasoning_content or ""


def _take_text(outcome: Outcome, text: str, now: float) -> None:
    if outcome.last_s is None:
        outcome.first_s = now
    else:
        outcome.gaps_s.append(now - outcome.last_s)
    outcome.last_s = now
    outcome.num_chunks += 1
    outcome.text += text


def _take_usage(outcome: Outcome, usage: _Usage) -> None:
    outcome.has_usage = True
    outcome.prompt_tokens = usage.prompt_tokens
    outcome.output_tokens = usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
