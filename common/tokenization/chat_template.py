"""Chat templates: conversations -> prompts, in Jinja2 as model repositories write them, in a sandbox."""

from __future__ import annotations

import copy
import datetime
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from common.errors import InvalidRequest
from common.tokenization.control_tokens import ControlTokens, RenderedPrompt, strings_in, unused_separator

MAX_RENDERED_CHARS: Final = 64 * 1024 * 1024
MAX_RENDER_S: Final = 10.0
_MAX_REPEATED: Final = 1_000_000


class ChatTemplate:
    """One template, compiled once. May be used from several threads at once."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], control_tokens: ControlTokens | None = None
    ) -> None:
        """``special_tokens``: ``bos_token`` and so on, as the template may name them. ``control_tokens``: what clients
        must not be able to forge (`Tokenizer.control_tokens`).

        Raises `InvalidRequest` (param ``chat_template``) when the source is no template.
        """
        self._special_tokens = dict(special_tokens)
        self._control_tokens = control_tokens or ControlTokens(())
        try:
            self._template = _environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template is not valid: {error}", param="chat_template") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """The prompt; encode it with `Tokenizer.encode_rendered`.

        ``variables``: further template variables (``enable_thinking`` and the like). ``continue_final_message``: the
        prompt ends in the middle of the last message, for the model to go on with it.

        Raises `InvalidRequest` (param ``messages``): the template refuses the conversation, fails on it, or makes
        more of it than any model can read.
        """
        given = {"messages": messages, "tools": tools, "documents": documents, **(variables or {})}
        separator = unused_separator(strings_in(given))
        context = {name: self._guarded(value, separator) for name, value in given.items()}
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest(
                    "add_generation_prompt and continue_final_message exclude each other",
                    param="continue_final_message",
                )
            _tag_final_message(context["messages"], separator)
        context = {**self._special_tokens, **context, "add_generation_prompt": add_generation_prompt}
        rendered = self._run(context)
        if continue_final_message:
            rendered = _cut_at_tag(rendered, separator)
        return RenderedPrompt(rendered, separator)

    def _guarded(self, value: Any, separator: str) -> Any:
        """A copy of what the client sent in which no control token can be read."""
        if isinstance(value, str):
            return self._control_tokens.guard(value, separator)
        if isinstance(value, Mapping):
            return {self._guarded(key, separator): self._guarded(item, separator) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(item, separator) for item in value]
        return copy.deepcopy(value)

    def _run(self, context: Mapping[str, Any]) -> str:
        deadline = time.monotonic() + MAX_RENDER_S
        parts: list[str] = []
        length = 0
        try:
            for part in self._template.generate(context):
                parts.append(part)
                length += len(part)
                if length > MAX_RENDERED_CHARS or time.monotonic() > deadline:
                    raise InvalidRequest("the chat template renders too much", param="messages")
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InvalidRequest(f"the chat template fails on these messages: {error}", param="messages") from error
        return "".join(parts)


def _tag(separator: str) -> str:
    """Stands after the final message; the space tells whether the template trims messages."""
    return f"{separator}{separator} "


def _tag_final_message(messages: list[dict[str, Any]], separator: str) -> None:
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = content + _tag(separator)
        return
    if isinstance(content, list):
        for part in reversed(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                part["text"] += _tag(separator)
                return
    raise InvalidRequest("continue_final_message needs a final message with text", param="continue_final_message")


def _cut_at_tag(rendered: str, separator: str) -> str:
    tag = _tag(separator)
    before, found, after = rendered.rpartition(tag.rstrip())
    if not found:
        raise InvalidRequest(
            "the chat template does not show the final message, which therefore cannot be continued",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks, for training, what the assistant wrote; here its content is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, which also refuses to multiply strings and lists into something huge."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, str | list | tuple) and isinstance(times, int):
                if len(repeated) * times > _MAX_REPEATED:
                    raise jinja2.exceptions.SecurityError("a repetition in the template is too long")
                break
        if operator == "**" and not (abs(left) <= _MAX_REPEATED and abs(right) <= 64):
            raise jinja2.exceptions.SecurityError("a power in the template is too large")
        return super().call_binop(context, operator, left, right)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: models are trained on it without HTML escapes and with characters as they are."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


def _make_environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_environment: Final = _make_environment()
