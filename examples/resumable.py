"""A chat stream that survives broken connections and dying edges, with the openai SDK's types.

    chat = ResumableChat(["http://edge-1:8000/v1", "http://edge-2:8000/v1"])
    async for chunk in chat.stream(model="demo", messages=[{"role": "user", "content": "Say hello"}]):
        print(chunk.choices[0].delta.content or "", end="")

The same body is posted with the same ``Idempotency-Key`` until the answer is complete, to one edge after the other,
with the position of the last chunk as ``Last-Event-ID``: the request runs once, and each chunk arrives once. An edge
that is shutting down says so with a comment; then the next one is asked at once.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
from openai import APIError
from openai.types.chat import ChatCompletionChunk

_HANDED_OVER = ": headrace resume"
_RETRIED = {408, 425, 429, 500, 502, 503, 504}


class ResumableChat:
    """Streams chat completions from any of several edges of one deployment."""

    def __init__(
        self, base_urls: Sequence[str], *, api_key: str = "", max_attempts: int = 20, read_timeout_s: float = 60.0
    ) -> None:
        """``max_attempts`` counts connections in a row that brought nothing new."""
        self._urls = [url.rstrip("/") for url in base_urls]
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._max_attempts = max_attempts
        self._timeout = httpx.Timeout(10.0, read=read_timeout_s)

    async def stream(self, **body: Any) -> AsyncIterator[ChatCompletionChunk]:
        """The chunks of ``POST /chat/completions`` with ``stream: true``, each exactly once.

        Raises `openai.APIError` for an error the server reports, `httpx.HTTPError` when no edge can be reached.
        """
        headers = {
            **self._headers,
            "Idempotency-Key": uuid.uuid4().hex,
            "X-Headrace-Resumable": "1",
        }
        fruitless = 0
        async with httpx.AsyncClient(timeout=self._timeout) as http:
            for url in itertools.cycle(self._urls):
                is_handed_over = False
                try:
                    async for position, data in self._read(http, f"{url}/chat/completions", body, headers):
                        if data == "[DONE]":
                            return
                        fruitless = 0
                        if data == _HANDED_OVER:
                            is_handed_over = True
                            continue
                        headers["Last-Event-ID"] = position
                        yield _chunk(data)
                    error: httpx.HTTPError = httpx.RemoteProtocolError("the stream ended without its end")
                except httpx.HTTPError as caught:
                    error = caught
                if is_handed_over:
                    continue
                fruitless += 1
                if fruitless >= self._max_attempts:
                    raise error
                await asyncio.sleep(min(0.1 * 2**fruitless, 2.0))

    async def _read(
        self, http: httpx.AsyncClient, url: str, body: dict[str, Any], headers: dict[str, str]
    ) -> AsyncIterator[tuple[str, str]]:
        """Positions and payloads of one connection."""
        position = headers.get("Last-Event-ID", "")
        async with http.stream("POST", url, json={**body, "stream": True}, headers=headers) as answer:
            if answer.status_code != 200:
                await answer.aread()
                if answer.status_code in _RETRIED:
                    answer.raise_for_status()
                raise APIError(answer.text, request=answer.request, body=answer.json().get("error"))  # type: ignore[arg-type]
            async for line in answer.aiter_lines():
                name, _, value = line.partition(": ")
                if name == "id":
                    position = value
                elif name == "data":
                    yield position, value
                elif line == _HANDED_OVER:
                    yield position, line


def _chunk(data: str) -> ChatCompletionChunk:
    content = json.loads(data)
    if "error" in content:
        raise APIError(content["error"]["message"], request=None, body=content["error"])  # type: ignore[arg-type]
    return ChatCompletionChunk.model_validate(content)
