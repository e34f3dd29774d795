"""The bytes of stream chunks. What is the same in all chunks of a stream is encoded once, and deltas are spliced in."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from edge.parsers.parts import CallArguments, CallStarted, Content, Part, Reasoning
from edge.translate.choice_fold import call_id
from edge.translate.presentation import CHAT, Presentation

encode: Final = msgspec.json.Encoder().encode

_PLAIN_END: Final = b',"logprobs":null,"finish_reason":null}]}'


class ChunkWriter:
    """For one stream. ``extra`` arguments are members of a chunk or a choice, already encoded, each after a comma."""

    def __init__(self, presentation: Presentation, num_choices: int) -> None:
        kind = "chat.completion.chunk" if presentation.endpoint == CHAT else "text_completion"
        head = {
            "id": presentation.response_id,
            "object": kind,
            "created": presentation.created,
            "model": presentation.model,
            "system_fingerprint": presentation.system_fingerprint,
        }
        self._presentation = presentation
        self._head = encode(head)[:-1] + b',"choices":['
        self._choice = [self._head + b'{"index":%d' % index for index in range(num_choices)]
        self._content = [choice + b',"delta":{"content":' for choice in self._choice]
        self._text = [choice + b',"text":' for choice in self._choice]

    def content(self, index: int, text: str) -> bytes:
        """A chat chunk with nothing but text: by far the most frequent one."""
        return self._content[index] + encode(text) + b"}" + _PLAIN_END

    def text(self, index: int, text: str) -> bytes:
        """A completion chunk with nothing but text."""
        return self._text[index] + encode(text) + _PLAIN_END

    def chat(self, index: int, delta: bytes, *, of_choice: bytes = b"", of_chunk: bytes = b"") -> bytes:
        """A chat chunk. ``of_choice`` begins with the logprobs and finish_reason where these are not null."""
        return self._choice[index] + b',"delta":' + delta + (of_choice or NOTHING) + b"}]" + of_chunk + b"}"

    def completion(self, index: int, text: str, *, of_choice: bytes = b"", of_chunk: bytes = b"") -> bytes:
        """A completion chunk."""
        return self._text[index] + encode(text) + (of_choice or NOTHING) + b"}]" + of_chunk + b"}"

    def usage(self, usage: object) -> bytes:
        """The chunk without choices."""
        return self._head + b'],"usage":' + encode(usage) + b"}"

    def delta(self, index: int, part: Part) -> bytes:
        """What a part of a chat answer looks like."""
        match part:
            case Content(text):
                return b'{"content":' + encode(text) + b"}"
            case Reasoning(text):
                shown = encode(text)
                return b'{"reasoning":' + shown + b',"reasoning_content":' + shown + b"}"
            case CallStarted(call, name):
                function = {"name": name, "arguments": ""}
                begun = {"index": call, "id": call_id(self._presentation, index, call), "type": "function"}
                return encode({"tool_calls": [{**begun, "function": function}]})
            case CallArguments(call, fragment):
                return encode({"tool_calls": [{"index": call, "function": {"arguments": fragment}}]})


NOTHING: Final = b',"logprobs":null,"finish_reason":null'
ROLE: Final = b'{"role":"assistant","content":""}'
NO_DELTA: Final = b"{}"


def choice_members(
    *,
    logprobs: object = None,
    finish_reason: str | None = None,
    stop_reason: str | int | None = None,
    token_ids: Any = None,
) -> bytes:
    """``of_choice`` of a chunk; ``token_ids`` and ``stop_reason`` only where there are any."""
    members = b',"logprobs":' + encode(logprobs) + b',"finish_reason":' + encode(finish_reason)
    if finish_reason is not None:
        members += b',"stop_reason":' + encode(stop_reason)
    if token_ids is not None:
        members += b',"token_ids":' + encode(token_ids)
    return members


def member(name: str, value: object) -> bytes:
    """One member after others."""
    return b',"%s":' % name.encode() + encode(value)
