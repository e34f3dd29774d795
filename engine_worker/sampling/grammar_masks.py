"""Structured output: which tokens a grammar allows next."""

from __future__ import annotations

from common.events import Grammar


class GrammarCompiler:
    """Compiles grammars once and hands out matchers. Thread-safe: intake compiles, the engine thread matches."""

    def __init__(self, tokenizer_json: bytes, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None: ...

    def compile(self, grammar: Grammar) -> None:
        """Compile and keep ``grammar``. Call it at intake, off the step loop.

        Raises `InvalidRequest` when the grammar is malformed or too complex.
        """
        raise NotImplementedError
