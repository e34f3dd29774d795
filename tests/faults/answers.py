"""From raw bytes to what a client knows: blocks of an event stream, and the answer that they or a document hold."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

WHOLE = 1 << 30  # chunk number of the last chunk of an event
Position = tuple[int, int]


@dataclass(frozen=True)
class Block:
    """One ``data:`` of an event stream. ``position`` None: not from the log. ``end``: where it ends in the bytes."""

    position: Position | None
    id: str
    data: bytes
    end: int

    @property
    def is_done(self) -> bool:
        return self.data == b"[DONE]"

    @property
    def error(self) -> str:
        """The code of an error document, else empty."""
        if self.is_done or not self.data.startswith(b'{"error"'):
            return ""
        return str(json.loads(self.data)["error"]["code"])


def blocks_of(raw: bytes) -> list[Block]:
    """Complete blocks only: what is cut off was not received, as the standard says."""
    blocks, start = [], 0
    while (end := raw.find(b"\n\n", start)) >= 0:
        lines = [line for line in raw[start:end].split(b"\n") if line and not line.startswith(b":")]
        names = dict(line.split(b": ", 1) for line in lines)
        assert set(names) <= {b"id", b"data"}, lines
        assert len(names) == len(lines), lines
        if b"data" in names:
            label = names.get(b"id", b"").decode()
            blocks.append(Block(_position(label), label, names[b"data"], end + 2))
        start = end + 2
    return blocks


def _position(label: str) -> Position | None:
    if not label:
        return None
    n, dot, k = label.partition(".")
    return int(n), int(k) if dot else WHOLE


@dataclass
class Choice:
    """One choice as a client puts it together."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    tokens: list[Any] = field(default_factory=list)  # log probabilities, an entry a token


@dataclass
class Answer:
    """A whole answer; equal answers are equal to the token and its probability."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] | None = None  # prompt and completion tokens
    error: str = ""

    @property
    def is_whole(self) -> bool:
        return bool(self.choices) and all(choice.finish_reason for choice in self.choices.values())


def answer_of_stream(blocks: Iterable[Block]) -> Answer:
    """Folds the chunks. Raises `AssertionError` when there is more than one end, or something after it."""
    answer, is_over = Answer(), False
    for block in blocks:
        assert not is_over, f"something after [DONE]: {block}"
        if block.is_done:
            is_over = True
        elif block.error:
            answer.error = block.error
        else:
            _take(answer, json.loads(block.data), "delta")
    return answer


def answer_of_document(document: dict[str, Any]) -> Answer:
    answer = Answer(error=str(document["error"]["code"]) if "error" in document else "")
    if not answer.error:
        _take(answer, document, "message")
    return answer


def _take(answer: Answer, document: dict[str, Any], part: str) -> None:
    if document.get("usage"):
        assert answer.usage is None, "two usages"
        usage = document["usage"]
        answer.usage = (usage["prompt_tokens"], usage["completion_tokens"])
        assert usage["total_tokens"] == sum(answer.usage)
    for given in document["choices"]:
        choice = answer.choices.setdefault(given["index"], Choice())
        if "text" in given:
            choice.text += given["text"]
        else:
            choice.text += given.get(part, {}).get("content") or ""
        choice.tokens += _entries(given.get("logprobs"))
        if given.get("finish_reason") is not None:
            assert choice.finish_reason is None, f"choice {given['index']} ends twice"
            choice.finish_reason, choice.stop_reason = given["finish_reason"], given.get("stop_reason")


def _entries(logprobs: dict[str, Any] | None) -> list[Any]:
    if not logprobs:
        return []
    if "content" in logprobs:
        return list(logprobs["content"] or [])
    return list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))
