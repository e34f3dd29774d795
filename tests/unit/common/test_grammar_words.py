"""What clients are told of the grammar compiler's own words."""

from __future__ import annotations

from common.grammar_words import plain


def test_a_fault_inside_the_compiler_is_told_without_its_inside() -> None:
    assert plain("panic: end byte index 100 is not a char boundary\n<backtrace>\n   0: <unknown>") == (
        "it cannot be compiled"
    )


def test_nothing_to_say_is_still_a_sentence() -> None:
    assert plain("<state>\n...") == "it cannot be compiled"
