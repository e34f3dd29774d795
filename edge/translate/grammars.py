"""The one module of the edge that sees the grammar compiler: it tries a constraint before anything is enqueued.

The trial uses a vocabulary of single bytes, which costs microseconds to set up and depends on no model: a grammar
that compiles here and can begin compiles in the worker. It also takes the first steps of some texts, since what is too
large (``"a"{1000000}``) compiles and gives up when it is followed.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from functools import cache
from typing import Final

import llguidance
import msgspec
import numpy as np

from common.deep_stack import on_deep_stack
from common.errors import InvalidRequest
from common.events import Grammar
from common.grammar_words import plain

MAX_SOURCE_CHARS: Final = 512 * 1024
_EOS: Final = 256
_TRIED_TEXTS: Final = 16
_TRIED_STEPS: Final = 3
_MAX_KNOWN: Final = 1024
_known: Final[OrderedDict[bytes, None]] = OrderedDict()
"""Digests of constraints that were tried and are good: applications send the same ones again and again."""


class GrammarRefused(InvalidRequest):
    """The compiler does not take the constraint; ``reason`` in its own words, the message in plain ones."""

    def __init__(self, reason: str, param: str = "") -> None:
        super().__init__(f"{param}: {plain(reason)}" if param else plain(reason), param=param or None)
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
    """``grammar``, which knows then that ``param`` asked for it, when it compiles and some text can begin to match it.

    Raises `GrammarRefused` naming ``param``.
    """
    if len(grammar.source) > MAX_SOURCE_CHARS:
        raise GrammarRefused(f"the constraint is longer than {MAX_SOURCE_CHARS} characters", param)
    digest = hashlib.sha256(f"{grammar.kind}\n{grammar.source}".encode()).digest()
    if digest not in _known:
        try:
            fault = on_deep_stack(lambda: _fault(grammar))
        except ValueError as error:
            raise GrammarRefused(str(error), param) from error
        if fault:
            raise GrammarRefused(fault, param)
        _known[digest] = None
        if len(_known) > _MAX_KNOWN:
            _known.pop(next(iter(_known)), None)
    return msgspec.structs.replace(grammar, param=param)


def gbnf_to_lark(source: str, param: str) -> str:
    """A grammar in the notation with ``::=`` as one in Lark's. Raises `GrammarRefused`."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        converted: str = any_to_lark(source)
    except Exception as error:  # the converter raises whatever its recursive descent runs into
        raise GrammarRefused(str(error), param) from error
    return converted


def _fault(grammar: Grammar) -> str:
    """Why ``grammar`` cannot be used, or an empty text. Raises ValueError when the source is malformed."""
    matcher = llguidance.LLMatcher(_trial_tokenizer(), _compiler_input(grammar), log_level=0)
    begins = _nexts(matcher)
    if matcher.is_error():
        return str(matcher.get_error())
    if matcher.is_stopped() and not matcher.is_accepting():
        return "nothing can match it"
    for byte in begins[:: -(-len(begins) // _TRIED_TEXTS) or 1]:
        text = matcher.deep_copy()
        for _ in range(_TRIED_STEPS):
            text.consume_token(byte)
            allowed = _nexts(text)
            if text.is_error():
                return str(text.get_error())
            if not allowed:
                break
            byte = allowed[0]
    return ""


def _nexts(matcher: llguidance.LLMatcher) -> list[int]:
    """The bytes that may come next; none when the text has to end, or at an error."""
    if matcher.is_error() or matcher.is_stopped():
        return []
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed: list[int] = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:_EOS]).tolist()
    return allowed


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
