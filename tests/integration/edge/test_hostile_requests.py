"""Every field with every kind of wrong value: an answer is whole, or a 4xx that says which field is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final

import httpx
import pytest
from pydantic import SecretStr

from edge.config import ApiSettings
from edge.openai.chat import ChatCompletionRequest
from edge.openai.completions import CompletionRequest
from edge.openai.sampling import GenerationFields
from edge.openai.tokenize import DetokenizeRequest, TokenizeRequest
from tests.integration.edge import letters_model
from tests.integration.edge.running_edge import ThreadedEdge
from tests.integration.edge.scripted_worker import ScriptedWorker

MODEL: Final = json.dumps(letters_model.NAME)
ENDPOINTS: Final[dict[str, tuple[type, dict[str, str]]]] = {
    "/v1/chat/completions": (
        ChatCompletionRequest,
        {"model": MODEL, "max_tokens": "2", "messages": '[{"role": "user", "content": "hi"}]'},
    ),
    "/v1/completions": (CompletionRequest, {"model": MODEL, "max_tokens": "2", "prompt": '"hi"'}),
    "/tokenize": (TokenizeRequest, {"model": MODEL, "prompt": '"hi"'}),
    "/detokenize": (DetokenizeRequest, {"model": MODEL, "tokens": "[1, 2]"}),
}
VALUES: Final = (
    *("null", "true", "0", "-1", "1.5", "9" * 40, "1e400", "NaN"),
    *('""', '"x"', '"a\\u0000b"', '"\\ud800"', '"' + "y" * 5000 + '"'),
    *("[]", "[null]", "[-1]", '[""]', '[1, "a"]', "[[1]]", f"[{'7, ' * 5000}7]"),
    *("{}", '{"a": null}', '{"1": 1e400}', '{"a":' * 150 + "1" + "}" * 150, "[" * 5000 + "]" * 5000, "tru", ""),
)
NESTED: Final = {
    "messages": (
        "[$]",
        '[{"role": $, "content": "x"}]',
        '[{"role": "user", "content": $}]',
        '[{"role": "user", "content": [$]}]',
        '[{"role": "user", "content": [{"type": $, "text": "x"}]}]',
        '[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"function": {"name": $}}]}]',
        '[{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": '
        '[{"function": {"name": "f", "arguments": $}}]}]',
    ),
    "tools": (
        '[{"type": "function", "function": $}]',
        '[{"type": "function", "function": {"name": $}}]',
        '[{"type": "function", "function": {"name": "f", "strict": true, "parameters": {"properties": $}}}]',
    ),
    "response_format": (
        '{"type": $}',
        '{"type": "json_schema", "json_schema": {"schema": $}}',
        '{"type": "json_schema", "json_schema": {"schema": {"type": "object", "required": $}}}',
        '{"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": $}}}',
    ),
    "structured_outputs": ('{"regex": $}', '{"choice": $}', '{"grammar": $}', '{"json": $}'),
    "stream_options": ('{"include_usage": $}',),
    "chat_template_kwargs": ('{"self": $}', '{"range": $}', '{"messages": $}'),
}


@pytest.fixture
async def client(edge: ThreadedEdge) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=4)
    async with httpx.AsyncClient(base_url=edge.url, timeout=60, limits=limits) as opened:
        yield opened


def cases(path: str) -> Iterator[tuple[str, str]]:
    """A field, and its value as it stands in the body."""
    kind, _ = ENDPOINTS[path]
    fields = {*kind.__struct_fields__, "unheard_of"} - {"unknown_fields"}
    if kind is CompletionRequest:  # what both have is tried once
        fields -= set(GenerationFields.__struct_fields__)
    for field in sorted(fields):
        for value in VALUES:
            # What is asked for without a bound may be long, and is allowed.
            if field not in ("max_tokens", "max_completion_tokens") or value not in ("null", "9" * 40):
                yield field, value
    if path == "/v1/chat/completions":
        yield from ((field, form.replace("$", value)) for field in NESTED for form in NESTED[field] for value in VALUES)


def check(answer: httpx.Response, field: str) -> None:
    if answer.status_code in (200, 202):  # the second of what runs in the background
        assert isinstance(whole(answer), dict)
        return
    assert 400 <= answer.status_code < 500
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(answer.content) < 3000
    assert "Traceback" not in error["message"]
    named = error["param"] or ""
    is_of_the_body = "the body is" in error["message"] or field == "stream"
    assert named.startswith((field, "messages", "prompt", "tokens")) or is_of_the_body, error


def whole(answer: httpx.Response) -> Any:
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()
    *chunks, last = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks][-1]


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_wrong_value_is_told_by_name_and_a_right_one_is_answered(client: httpx.AsyncClient, path: str) -> None:
    _, usual = ENDPOINTS[path]
    wrong: list[str] = []

    async def ask(field: str, value: str) -> None:
        document = ", ".join(f'"{name}": {text}' for name, text in {**usual, field: value}.items())
        answer = await client.post(path, content=f"{{{document}}}".encode())
        try:
            check(answer, field)
        except (AssertionError, ValueError, LookupError) as error:
            wrong.append(f"{field} = {value[:80]}: {answer.status_code} {answer.text[:200]} ({str(error)[:200]})")

    waiting = iter(list(cases(path)))

    async def worker() -> None:
        for field, value in waiting:
            await ask(field, value)

    await asyncio.gather(*(worker() for _ in range(4)))
    assert not wrong, "\n".join(wrong[:20])
    page = (await client.get("/metrics")).text
    reasons = {line.split('"')[1] for line in page.splitlines() if line.startswith("headrace_edge_rejections_total{")}
    codes = {"invalid_request", "model_not_found", "unsupported_parameter", "context_length_exceeded"}
    assert reasons <= codes, "what clients send has become a label"


async def test_a_405_names_every_method_of_the_path(client: httpx.AsyncClient) -> None:
    answer = await client.put("/v1/streams/0-00000000-0000-7000-8000-000000000000")
    assert (answer.status_code, answer.headers["allow"]) == (405, "DELETE, GET")
    assert "DELETE, GET" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping"])
async def test_probes_answer_head(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("query", ["stream=maybe", "after=soon", "after_chunks=-1", "after=%b2"])
async def test_a_query_that_is_not_understood_is_400_in_openai_form(client: httpx.AsyncClient, query: str) -> None:
    answer = await client.get(f"/v1/streams/0-00000000-0000-7000-8000-000000000000?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


async def test_an_announced_patience_that_is_no_number_is_ignored(client: httpx.AsyncClient) -> None:
    asked = {"model": letters_model.NAME, "prompt": "hi", "max_tokens": 2}
    for announced in (b"\xb2", b"soon", b"."):
        answer = await client.post("/v1/completions", json=asked, headers={b"X-Stainless-Read-Timeout": announced})
        assert answer.status_code == 200


async def test_a_repeated_post_without_a_key_is_not_spliced_to_another_generation(client: httpx.AsyncClient) -> None:
    asked = {"model": letters_model.NAME, "prompt": "hi", "max_tokens": 9, "stream": True}
    answer = await client.post("/v1/completions", json=asked, headers={"Last-Event-ID": "5"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_a_repeated_post_whose_request_is_gone_begins_nothing(
    client: httpx.AsyncClient, worker: ScriptedWorker
) -> None:
    asked = {"model": letters_model.NAME, "prompt": "hi", "max_tokens": 9, "stream": True}
    headers = {"Idempotency-Key": "forgotten", "Last-Event-ID": "5"}
    answer = await client.post("/v1/completions", json=asked, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "stream_expired")
    assert not worker.seen
    del headers["Last-Event-ID"]
    assert "[DONE]" in (await client.post("/v1/completions", json=asked, headers=headers)).text


async def test_a_repeated_post_from_beyond_its_end_is_told_so(client: httpx.AsyncClient) -> None:
    asked = {"model": letters_model.NAME, "prompt": "hi", "max_tokens": 2, "stream": True}
    key = {"Idempotency-Key": "short"}
    assert "[DONE]" in (await client.post("/v1/completions", json=asked, headers=key)).text
    answer = await client.post("/v1/completions", json=asked, headers=key | {"Last-Event-ID": "5000"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")


async def test_a_request_of_another_tenant_and_one_that_never_was_look_alike(make_edge: Callable[..., Any]) -> None:
    keys = ApiSettings(api_keys=(SecretStr("one"), SecretStr("two")))
    edge = await asyncio.to_thread(make_edge(api=keys).start)
    asked = {"model": letters_model.NAME, "prompt": "hi", "max_tokens": 2}
    key = {"Idempotency-Key": "shared"}
    async with httpx.AsyncClient(base_url=edge.url, timeout=30) as client:
        mine, theirs = ({"Authorization": f"Bearer {name}"} for name in ("one", "two"))
        first = await client.post("/v1/completions", json=asked | {"user": "a"}, headers=key | mine)
        other = await client.post("/v1/completions", json=asked | {"user": "b"}, headers=key | theirs)
        assert (first.status_code, other.status_code) == (200, 200)  # no conflict between tenants
        request_id = first.headers["x-request-id"]
        assert request_id != other.headers["x-request-id"]
        for method, rest in (("GET", ""), ("GET", "/status"), ("DELETE", "")):
            seen = []
            for asked_for in (request_id, request_id[:-12] + "0" * 12):
                answer = await client.request(method, f"/v1/streams/{asked_for}{rest}", headers=theirs)
                message = answer.json()["error"]["message"].replace(asked_for, "")
                seen.append((answer.status_code, message.partition(" (request id")[0]))
            assert seen[0] == seen[1], (method, rest)
            assert seen[0][0] == 410
