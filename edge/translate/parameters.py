"""Parameters that are no fields of ours: harmless ones are accepted, others refused or (compatible mode) ignored.

Harmless are hints that change no answer (`user`, `store`, ...), and features in the state in which they are off. A
constraint on the output that we do not know is refused in compatible mode too: ignoring it would be a lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from common.errors import UnsupportedParameter
from edge.openai.decoding import echo

HARMLESS: Final = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "prompt_cache_options", "prediction", "verbosity", "session_id", "request_id",
        "stream_interval", "guided_decoding_backend", "length_penalty", "spaces_between_special_tokens", "cache_prompt",
        "return_token_offsets", "early_stopping",
    }
)  # fmt: skip

_CONSTRAINTS: Final = frozenset(
    {
        "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object",
        "guided_whitespace_pattern", "grammar", "json_schema", "regex", "ebnf", "structural_tag",
        "thinking_token_budget", "repetition_detection",
    }
)  # fmt: skip

_USE_INSTEAD: Final = {
    "guided_json": "structured_outputs.json or response_format",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "json_schema": "response_format",
    "regex": "structured_outputs.regex",
    "grammar": "structured_outputs.grammar",
    "functions": "tools",
    "function_call": "tool_choice",
    "max_output_tokens": "max_completion_tokens",
    "max_new_tokens": "max_tokens",
    "best_of": "n",
}

_OFF: Final[Mapping[str, Callable[[Any], bool]]] = {
    "modalities": lambda value: value == ["text"],
    "best_of": lambda value: value == 1,
    "suffix": lambda value: value == "",
}


def check_parameters(unknown: Mapping[str, Any], *, compat: bool) -> tuple[str, ...]:
    """Names of the parameters that compatible mode ignores; empty in strict mode.

    ``unknown``: fields with a value that are none of ours. Raises `UnsupportedParameter` for the first that must not
    be ignored.
    """
    ignored = []
    for name, value in unknown.items():
        if name in HARMLESS or _is_off(name, value):
            continue
        if name in _CONSTRAINTS or not compat:
            raise _unsupported(name, value)
        ignored.append(name)
    return tuple(ignored)


def _is_off(name: str, value: object) -> bool:
    return _OFF[name](value) if name in _OFF else value is False or value == [] or value == {}


def _unsupported(name: str, value: object) -> UnsupportedParameter:
    shown = echo(name).strip("'\"")
    instead = f"; use {_USE_INSTEAD[name]}" if name in _USE_INSTEAD else ""
    return UnsupportedParameter(f"parameter {shown} is not supported{instead} (value {echo(value)})", param=shown)
