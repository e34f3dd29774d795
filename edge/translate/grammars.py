"""The one module of the edge that sees the grammar compiler: it tries a constraint before anything is enqueued.

The trial uses a vocabulary of single bytes, which costs microseconds to set up and depends on no model: a grammar
that compiles here and can begin compiles in the worker.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Final

import llguidance

from common.deep_stack import on_deep_stack
from common.errors import InvalidRequest
from common.events import Grammar

MAX_SOURCE_CHARS: Final = 512 * 1024
_EOS: Final = 256
_FAULT_CHARS: Final = 300
_STATE_DUMP: Final = re.compile(r"\n?<state>.*", re.DOTALL)


class GrammarRefused(InvalidRequest):
    """The compiler does not take the constraint; ``reason`` in its own words."""

    def __init__(self, reason: str, param: str = "") -> None:
        super().__init__(f"{param}: {reason}" if param else reason, param=param or None)
        self.reason = reason


class _Bytes:
    """Every byte is a token; the last token ends the text."""

    eos_token_id = _EOS
    bos_token_id = None
    tokens: Final = (*(bytes([byte]) for byte in range(_EOS)), b"<|end|>")
    special_token_ids: Final = (_EOS,)

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@cache
def _trial_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), slices=[])


def check_grammar(grammar: Grammar, param: str) -> Grammar:
    """``grammar``, when it compiles and some text can begin to match it. Raises `GrammarRefused` naming ``param``."""
    if len(grammar.source) > MAX_SOURCE_CHARS:
        raise GrammarRefused(f"the constraint is longer than {MAX_SOURCE_CHARS} characters", param)
    try:
        matcher = on_deep_stack(lambda: _compiled(grammar))
    except ValueError as error:
        raise GrammarRefused(_short(str(error)), param) from error
    if matcher.is_error():
        raise GrammarRefused(_short(matcher.get_error()), param)
    if matcher.is_stopped() and not matcher.is_accepting():
        raise GrammarRefused("nothing can match it", param)
    return grammar


def gbnf_to_lark(source: str, param: str) -> str:
    """A grammar in the notation with ``::=`` as one in Lark's. Raises `GrammarRefused`."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        converted: str = any_to_lark(source)
    except Exception as error:  # the converter raises whatever its recursive descent runs into
        raise GrammarRefused(_short(str(error)), param) from error
    return converted


def _compiled(grammar: Grammar) -> llguidance.LLMatcher:
    """Where the matcher can begin. Raises ValueError when the source is malformed."""
    matcher = llguidance.LLMatcher(_trial_tokenizer(), _compiler_input(grammar), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _compiler_input(grammar: Grammar) -> str:
    if grammar.kind == "choice":
        return _lark(
            "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.source))
        )
    if grammar.kind == "json_schema":
        compiled: str = llguidance.LLMatcher.grammar_from_json_schema(grammar.source)
        return compiled
    if grammar.kind == "regex":
        regex: str = llguidance.LLMatcher.grammar_from_regex(grammar.source)
        return regex
    return _lark(grammar.source)


def _lark(source: str) -> str:
    compiled: str = llguidance.LLMatcher.grammar_from_lark(source)
    return compiled


def _short(reason: str) -> str:
    """The compiler's message without its dump of parser states."""
    return _STATE_DUMP.sub("", reason).strip()[:_FAULT_CHARS] or "it cannot be compiled"
