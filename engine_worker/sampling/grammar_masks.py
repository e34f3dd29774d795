"""Structured output: which tokens a grammar allows next. The only module that meets llguidance.

A matcher's state is a function of the grammar and the output tokens: after a preemption or a failover it is built
again by consuming them.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from common.deep_stack import on_deep_stack
from common.errors import InvalidRequest
from common.events import Grammar
from common.grammar_words import is_too_large, plain
from common.tokenization.control_tokens import isolated
from engine_worker.sampling.number_ends import MAX_DIGITS, DigitTokens, digits_at_the_end
from engine_worker.sampling.transfer import to_device
from engine_worker.sequence import Sequence
from engine_worker.step import RequestAtFault

MAX_GRAMMARS: Final = 256  # compiled grammars kept

# JSON allows any amount of white space, and small models can fall into writing nothing else.
_JSON_DEFAULTS: Final = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,64}"}


class GrammarCompiler:
    """Compiles each grammar once and hands out matchers. Thread-safe: intake compiles, the engine thread matches."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """``vocab_size``: width of the logits. Raises ValueError when the tokenizer cannot be understood."""
        self._tokenizer = LLTokenizer(
            _without_spelled_control_tokens(tokenizer_json), n_vocab=vocab_size, eos_token=list(eos_token_ids) or None
        )
        self._eos_token_ids = eos_token_ids
        self._num_words = -(-self._tokenizer.vocab_size // 32)
        self._digits: DigitTokens | None = None  # from the first grammar with numbers on
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> None:
        """Compile and keep ``grammar``. Call it at intake, off the step loop; it can take a second.

        Raises `InvalidRequest` when the grammar is malformed, too complex or allows no text at all.
        """
        self._prototype(grammar)

    def matcher(self, sequence: Sequence) -> GrammarMatcher:
        """A matcher that stands after the output tokens of ``sequence``. Raises `InvalidRequest` as `compile` does."""
        assert sequence.sampling.grammar is not None, sequence
        prototype = self._prototype(sequence.sampling.grammar)
        mask = np.zeros(self._num_words, dtype=np.int32)
        digits = self._digits if _has_numbers(sequence.sampling.grammar) else None
        return GrammarMatcher(prototype.deep_copy(), sequence, mask, self._tokenizer, digits)

    def _prototype(self, grammar: Grammar) -> LLMatcher:
        key = (grammar.kind, grammar.source)
        with self._lock:
            if key in self._compiled:
                self._compiled.move_to_end(key)
                return self._compiled[key]
        matcher = on_deep_stack(lambda: self._begun(grammar))
        if matcher.is_error():
            raise InvalidRequest(f"{_named(grammar)}: {plain(matcher.get_error())}", param=_param(grammar))
        with self._lock:
            if self._digits is None and _has_numbers(grammar):
                self._digits = DigitTokens(self._tokenizer, self._eos_token_ids)
            self._compiled[key] = matcher
            if len(self._compiled) > MAX_GRAMMARS:
                self._compiled.popitem(last=False)
        return matcher

    def _begun(self, grammar: Grammar) -> LLMatcher:
        """Where a matcher may begin, or with the error that shows at its first mask."""
        matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=LLParserLimits(verbose_errors=False))
        # The first mask is the most expensive one, and shows what the constructor lets pass (a $ref to itself).
        _fill_mask(matcher, np.zeros(self._num_words, dtype=np.int32))
        return matcher


class GrammarMatcher:
    """Where one sequence stands in its grammar. Used by the engine thread alone."""

    def __init__(
        self,
        matcher: LLMatcher,
        sequence: Sequence,
        mask: np.ndarray,
        tokenizer: LLTokenizer,
        digits: DigitTokens | None,
    ) -> None:
        """``mask``: int32, room for one bit a token. ``digits``: given where the text may have numbers in JSON."""
        self._matcher = matcher
        self._sequence = sequence
        self._num_consumed = 0
        self._mask = mask
        self._tokenizer = tokenizer
        self._digits = digits
        self._num_digits = 0  # those that the output ends with

    def mask(self, row: Tensor) -> str | None:
        """Set what may not come next to -inf in ``row``, fp32 [V]; at the end of the grammar only EOS is left.

        Returns why that failed, or None; the matcher is of no use after a failure.
        """
        sequence = self._sequence
        output = sequence.tokens[sequence.num_prompt_tokens + self._num_consumed : sequence.num_tokens].tolist()
        self._num_consumed += len(output)
        for token in output:
            if self._matcher.is_stopped():  # a request that ignores EOS goes on with it
                break
            self._matcher.consume_token(token)
            self._num_digits = digits_at_the_end(self._tokenizer.decode_bytes([token]), self._num_digits)
        _fill_mask(self._matcher, self._mask)
        if self._matcher.is_error():
            return self._fault()
        if self._digits is not None and self._num_digits >= MAX_DIGITS:
            self._digits.stop(self._mask)
        forbidden = np.unpackbits(~self._mask.view(np.uint8), bitorder="little")[: len(row)]
        row.masked_fill_(to_device(forbidden.view(np.bool_), row.device), float("-inf"))
        return None

    @property
    def end(self) -> int | None:
        """The token that ends the text, where the grammar lets it end as it stands."""
        eos_token_ids = self._sequence.sampling.eos_token_ids
        may_end = self._matcher.is_stopped() or self._matcher.is_accepting()
        return eos_token_ids[0] if eos_token_ids and may_end else None

    def _fault(self) -> str:
        """The grammar compiled, and cannot be followed any further: it is too large at this place, or the output is not
        one of its own (which is no fault of the request)."""
        reason = str(self._matcher.get_error())
        grammar = self._sequence.sampling.grammar
        if grammar is None or not is_too_large(reason):
            return f"grammar: {plain(reason)}"
        words = f"{_named(grammar)}: after {self._num_consumed} tokens: {plain(reason)}"
        return RequestAtFault(words, param=_param(grammar))


def _without_spelled_control_tokens(tokenizer_json: bytes) -> str:
    """The tokenizer with control tokens that no text spells: a literal of a grammar that reads as one is text, as it is
    in a prompt. Else llguidance would take the token for the text, and find then that it does not match."""
    parsed = json.loads(tokenizer_json)
    special = [token["content"] for token in parsed.get("added_tokens", []) if token.get("special")]
    return json.dumps(isolated(parsed, special)[0])


def _fill_mask(matcher: LLMatcher, mask: np.ndarray) -> None:
    """One bit a token, 1 = allowed, lowest bit first."""
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)


def _has_numbers(grammar: Grammar) -> bool:
    """Whether it describes JSON, as a whole or in a part."""
    return grammar.kind == "json_schema" or (grammar.kind == "lark" and "%json" in grammar.source)


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's words."""
    match grammar.kind:
        case "json_schema":
            schema = _parse_json(grammar)
            if not isinstance(schema, (dict, bool)):
                raise InvalidRequest("json_schema: the schema must be a JSON object", param=_param(grammar))
            source: str = LLMatcher.grammar_from_json_schema(grammar.source, defaults=_JSON_DEFAULTS)
        case "regex":
            source = LLMatcher.grammar_from_regex(grammar.source)
        case "lark":
            source = LLMatcher.grammar_from_lark(grammar.source)
        case "choice":
            options = _parse_json(grammar)
            if not isinstance(options, list) or not options or not all(isinstance(o, str) for o in options):
                raise InvalidRequest("choice: expected a list of strings", param=_param(grammar))
            quoted = (json.dumps(option, ensure_ascii=False) for option in options)
            source = LLMatcher.grammar_from_lark(f"start: {' | '.join(quoted)}")
        case _:
            raise InvalidRequest(f"unknown kind of grammar {grammar.kind!r}", param=_param(grammar))
    return source


def _named(grammar: Grammar) -> str:
    return grammar.param or grammar.kind


def _param(grammar: Grammar) -> str:
    return grammar.param or "response_format"


def _parse_json(grammar: Grammar) -> object:
    try:
        return json.loads(grammar.source)
    except ValueError as error:
        raise InvalidRequest(f"{grammar.kind}: not JSON: {error}", param=_param(grammar)) from error
