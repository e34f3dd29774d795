"""tools and tool_choice to what the prompt shows, what the grammar forces, and what the parser expects."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from common.errors import InvalidRequest, UnsupportedParameter
from common.events import Grammar
from edge.openai.chat import ChatCompletionRequest
from edge.openai.decoding import echo
from edge.parsers.tool_calls import HERMES, LLAMA3_JSON, MISTRAL
from edge.translate.constraints import (
    JSON_OBJECT,
    JSON_STYLE,
    LENIENT,
    OURS,
    Thinking,
    after_thinking,
    json_grammar,
    lark_rule,
    lark_schema,
    lark_text,
)
from edge.translate.grammars import GrammarRefused, check_grammar
from edge.translate.schemas import Schema

MAX_TOOLS: Final = 256
MAX_NAME_CHARS: Final = 256
MAX_FORCED_CALLS: Final = 32


@dataclass(frozen=True, slots=True)
class Tool:
    """One function the model may call. ``parameters`` describes an object."""

    name: str
    parameters: Schema
    is_strict: bool
    definition: dict[str, Any]  # as the template gets it
    param: str  # where it stands in the body


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """``choice``: none, auto, required or named. ``callable``: those that may be called; empty with none."""

    choice: str = "none"
    callable: tuple[Tool, ...] = ()
    shown: tuple[Tool, ...] = ()  # those that the prompt describes
    is_parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.choice in ("required", "named")


def plan_tools(body: ChatCompletionRequest) -> ToolPlan:
    """Raises `InvalidRequest` naming the tool, or ``tool_choice``."""
    if body.tools is None:
        if body.tool_choice in (None, "none"):
            return ToolPlan()
        raise InvalidRequest(f"tool_choice {echo(body.tool_choice)} needs tools", param="tool_choice")
    tools = parse_tools(body.tools)
    choice = "auto" if body.tool_choice is None else body.tool_choice
    if isinstance(choice, dict):
        named = _named(choice, tools)
        return ToolPlan(choice="named", callable=(named,), shown=tools, is_parallel=False)
    if choice == "none":
        return ToolPlan()
    if choice not in ("auto", "required"):
        raise InvalidRequest(
            f"tool_choice must be none, auto, required or name a function, got {echo(choice)}", param="tool_choice"
        )
    return ToolPlan(choice=choice, callable=tools, shown=tools, is_parallel=body.parallel_tool_calls)


def parse_tools(tools: Sequence[dict[str, Any]]) -> tuple[Tool, ...]:
    """Raises `InvalidRequest` naming the tool that is wrong."""
    if not tools:
        raise InvalidRequest("tools must not be an empty list; leave it out", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"tools has {len(tools)} entries, the limit is {MAX_TOOLS}", param="tools")
    parsed = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = [tool.name for tool in parsed]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise InvalidRequest(f"tools[{i}].function.name {echo(name)} is there twice", param="tools")
    return parsed


def tool_grammar(plan: ToolPlan, tool_format: str, thinking: Thinking) -> Grammar | None:
    """The grammar that keeps calls well-formed: always for required and named, for auto if a tool is strict.

    Text beside calls can be left free only in the hermes format, where a tag begins them; with auto, the other
    formats are not constrained. Raises `InvalidRequest` naming the tool whose strict schema cannot be kept to.
    """
    if plan.is_forced:
        grammar = Grammar(kind="lark", source=_forced(plan, tool_format))
        return after_thinking(check_grammar(grammar, "tools"), thinking, "tools")
    if plan.choice == "auto" and tool_format == HERMES and any(tool.is_strict for tool in plan.callable):
        return check_grammar(Grammar(kind="lark", source=_free(plan)), "tools")
    return None


def calls_or(plan: ToolPlan, tool_format: str, grammar: Grammar, param: str) -> Grammar:
    """Either calls, or the answer that ``grammar`` describes: agents send both tools and a format for the end.

    Mistral's marker is a special token that no grammar can spell, so that there ``grammar`` alone is kept to.
    """
    if plan.choice != "auto" or not plan.callable or tool_format == MISTRAL:
        return grammar
    calls = _forced(plan, tool_format).removeprefix(OURS)
    source = f"{OURS}calls | reply\ncalls: {calls}{lark_rule('reply', grammar, param)}\n"
    return check_grammar(Grammar(kind="lark", source=source), param)


def _tool(tool: dict[str, Any], param: str) -> Tool:
    kind = tool.get("type", "function")
    if kind != "function":
        raise UnsupportedParameter(f"{param}.type must be function, got {echo(kind)}", param=f"{param}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{param}.function must be an object, got {echo(function)}", param=f"{param}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_CHARS or not name.isprintable():
        raise InvalidRequest(
            f"{param}.function.name must be text of 1 to {MAX_NAME_CHARS} printable characters, got {echo(name)}",
            param=f"{param}.function.name",
        )
    for key, wanted in (("description", str), ("strict", bool)):
        if function.get(key) is not None and not isinstance(function[key], wanted):
            raise InvalidRequest(
                f"{param}.function.{key} must be of type {wanted.__name__}, got {echo(function[key])}",
                param=f"{param}.function.{key}",
            )
    parameters = _parameters(function.get("parameters"), f"{param}.function.parameters")
    shown = {key: value for key, value in function.items() if value is not None and key != "strict"}
    definition = {"type": "function", "function": {**shown, "name": name, "parameters": parameters}}
    return Tool(name, parameters, function.get("strict") is True, definition, param)


def _parameters(value: object, param: str) -> Schema:
    if value is None or value == {}:
        return {"type": "object", "properties": {}}
    if not isinstance(value, dict) or value.get("type", "object") != "object":
        raise InvalidRequest(f"{param} must be a JSON schema of type object, got {echo(value)}", param=param)
    return {"type": "object", **value}


def _named(choice: dict[str, Any], tools: Sequence[Tool]) -> Tool:
    if choice.get("type", "function") != "function":
        raise UnsupportedParameter(
            f"tool_choice.type must be function, got {echo(choice.get('type'))}", param="tool_choice"
        )
    function = choice.get("function", choice)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(f"tool_choice.function.name must be text, got {echo(name)}", param="tool_choice")
    for tool in tools:
        if tool.name == name:
            return tool
    raise InvalidRequest(f"tool_choice names {echo(name)}, which is none of the tools", param="tool_choice")


def _arguments(tool: Tool) -> Grammar:
    """What a call's arguments must match: the schema exactly if strict, else as much of it as can be expressed."""
    param = f"{tool.param}.function.parameters"
    if tool.is_strict:
        return json_grammar(tool.parameters, param)
    for options in (JSON_STYLE, LENIENT):
        with contextlib.suppress(GrammarRefused):
            return json_grammar(tool.parameters, param, options=options)
    return json_grammar(JSON_OBJECT, param)


def _forced(plan: ToolPlan, tool_format: str) -> str:
    """One call, or several where they may be parallel, in the model's own notation."""
    rules = _call_rules(plan.callable, "parameters" if tool_format == LLAMA3_JSON else "arguments")
    if tool_format == HERMES:
        before, between, after = "<tool_call>\n", "\n", "\n</tool_call>"
        one = f"{lark_text(before)} call {lark_text(after)}"
        more = f"{lark_text(between)} {one}"
        start = one
    elif tool_format == LLAMA3_JSON:
        start, more = "call", '"; " call'
    else:
        start, more = "call", '", " call'
    repeated = f" ({more}){{0,{MAX_FORCED_CALLS - 1}}}" if plan.is_parallel else ""
    whole = start + repeated
    if tool_format not in (HERMES, LLAMA3_JSON):
        whole = f'"[" {whole} "]"'
    return f"{OURS}{whole}\n{rules}"


def _free(plan: ToolPlan) -> str:
    """Text in which every opening tag begins a well-formed call."""
    rules = _call_rules(plan.callable, "arguments")
    blocks = f"block{{0,{MAX_FORCED_CALLS}}}" if plan.is_parallel else "block?"
    return (
        f'{OURS}{blocks} TAIL\nblock: before "\\n" call "\\n</tool_call>"\n'
        'before[suffix="<tool_call>"]: /(?s:.*)/\n'
        "TAIL: /(?s:.*)/ & ~/(?s:.*)<tool_call>(?s:.*)/\n"
        f"{rules}"
    )


def _call_rules(tools: Sequence[Tool], key: str) -> str:
    lines = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, tool in enumerate(tools):
        head = f'{{"name": {lark_text(tool.name)}, "{key}": '
        lines.append(f'call_{i}: {lark_text(head)} {lark_schema(_arguments(tool))} "}}"')
    return "\n".join(lines) + "\n"
