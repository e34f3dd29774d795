"""Conversations as clients send them to what chat templates take.

Roles are checked, contents flattened to text, arguments of earlier calls parsed. For a template that knows nothing of
tools, tools are described in the system message and calls and results written out as text, in the hermes notation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from common.errors import InvalidRequest
from edge.openai.decoding import echo

MAX_MESSAGES: Final = 16384
_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS: Final = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MAY_BE_EMPTY: Final = ("assistant",)

Message = dict[str, Any]

_TOOLS_INTRODUCTION: Final = (
    "# Tools\n\nYou may call functions to help with the user's request. Their signatures are inside <tools></tools>, "
    "one JSON object a line:\n<tools>\n"
)
_TOOLS_INSTRUCTION: Final = (
    "\n</tools>\n\nTo call a function, answer with its name and arguments as a JSON object inside "
    '<tool_call></tool_call> tags:\n<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n'
    "</tool_call>"
)


def normalise_messages(messages: Sequence[Message], *, renders_developer: bool) -> list[Message]:
    """Raises `InvalidRequest` naming the message and the key that is wrong."""
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"messages has {len(messages)} entries, the limit is {MAX_MESSAGES}", param="messages")
    return [_normalised(message, f"messages[{i}]", renders_developer) for i, message in enumerate(messages)]


def with_tools_as_text(messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> list[Message]:
    """For templates without tools: hermes notation in ordinary messages."""
    written = [_as_text(message) for message in messages]
    if not tools:
        return written
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    description = _TOOLS_INTRODUCTION + lines + _TOOLS_INSTRUCTION
    if written[0]["role"] == "system":
        first = {**written[0], "content": f"{written[0]['content']}\n\n{description}"}
        return [first, *written[1:]]
    return [{"role": "system", "content": description}, *written]


def _normalised(message: Message, where: str, renders_developer: bool) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(_ROLES)}, got {echo(role)}", param=f"{where}.role"
        )
    result = {key: value for key, value in message.items() if value is not None}
    if role == "developer" and not renders_developer:
        result["role"] = "system"
    if role == "function":
        result["role"] = "tool"
    result["content"] = _content(message, role, where)
    calls = _tool_calls(message.get("tool_calls"), where) if role == "assistant" else []
    result.pop("tool_calls", None)
    if calls:
        result["tool_calls"] = calls
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if role == "assistant" and isinstance(reasoning, str):
        result["reasoning"] = result["reasoning_content"] = reasoning
    return result


def _content(message: Message, role: str, where: str) -> str:
    content = message.get("content")
    param = f"{where}.content"
    if content is None:
        if role in _MAY_BE_EMPTY:
            return ""
        raise InvalidRequest(f"{param} is required for the role {role} and must not be null", param=param)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{param} must be text or a list of parts, got {echo(content)}", param=param)
    return "".join(_part_text(part, f"{param}[{i}]") for i, part in enumerate(content))


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidRequest(f"{where} must be an object with a type, got {echo(part)}", param=where)
    if kind not in _TEXT_PARTS:
        raise InvalidRequest(
            f"{where}: this model takes text only, a part of type {echo(kind)} is not supported", param=where
        )
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}.{_TEXT_PARTS[kind]} must be text, got {echo(text)}", param=where)
    return text


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls must be a list, got {echo(calls)}", param=f"{where}.tool_calls")
    return [_tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidRequest(f"{where} must have a function, got {echo(call)}", param=where)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(f"{where}.function.name must be text, got {echo(name)}", param=f"{where}.function.name")
    arguments = _arguments_object(function.get("arguments"))
    return {**call, "type": "function", "function": {**function, "name": name, "arguments": arguments}}


def _arguments_object(arguments: object) -> dict[str, Any]:
    """Templates iterate over arguments, so they get an object whatever an earlier, perhaps cut, answer contained."""
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    parsed: object = arguments
    if isinstance(arguments, str):
        try:
            parsed = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return {"arguments": arguments}
    return parsed if isinstance(parsed, dict) else {"arguments": parsed}


def _as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = "\n".join(f"<tool_call>\n{_written_call(call)}\n</tool_call>" for call in calls)
    content = f"{message['content']}\n{written}" if message["content"] else written
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}


def _written_call(call: dict[str, Any]) -> str:
    function = call["function"]
    return json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
