"""What the grammar compiler says, in words that a client of the API can use.

Its messages name parts of its own implementation; those known to reach clients are told again here, others pass.
"""

from __future__ import annotations

import re
from typing import Final

_LONGEST: Final = 300
_STATE_DUMP: Final = re.compile(r"\n?<state>.*", re.DOTALL)
_TOO_LARGE: Final = (
    "it is too large to be followed: it repeats too often, or allows too much at one place; use smaller repetitions"
)
_NOTHING: Final = "nothing can match it"
_MALFORMED: Final = "it cannot be compiled"
_PLAIN: Final = tuple(
    (re.compile(pattern, re.DOTALL), words)
    for pattern, words in (
        (r"^(?:parser|lexer) error: .*(?:[Tt]oo many|fuel|too large|limit).*", _TOO_LARGE),
        (r"^(?:initial lexer configuration|.*grammar size) .*(?:too (?:big|large|complex)|limit).*", _TOO_LARGE),
        (r"^panic: .*", _MALFORMED),  # the rest is a backtrace
        (r"^(?:NoExtensionBias|NoExtension)$", _NOTHING),
        (r"^Unsatisfiable schema: Regex is empty.*", f"{_NOTHING}: pattern, format and length contradict each other"),
        (r"^Unsatisfiable schema: ", f"{_NOTHING}: "),
        (r"^Unimplemented keys: \[(.*)\]$", r"these keywords are not supported: \1"),
        (r"^Invalid type: ", "there is no such type: "),
        (r"^Pointer '(.*)' does not exist$", r"a $ref leads nowhere: '#\1'"),
        (r"^Resource '(.*)' is not present in a registry.*", r"references out of the document are not followed: '\1'"),
        (r"^oneOf constraints are not supported.*", "oneOf whose alternatives overlap is not supported; use anyOf"),
        (r"^(?:at )?(\d+)\((\d+)\): lexer error", r"line \1, column \2: the grammar cannot be read from here on"),
        (r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: "),
        (r"; following special tokens are available: .*", ""),
    )
)


def is_too_large(reason: str) -> bool:
    """Whether the compiler gave the constraint up for its size, wherever on the way."""
    return plain(reason) == _TOO_LARGE


def plain(reason: str) -> str:
    """The compiler's ``reason`` for refusing a constraint, or for giving it up on the way: bounded, never empty."""
    words = _STATE_DUMP.sub("", reason).strip()
    for pattern, replacement in _PLAIN:
        words = pattern.sub(replacement, words)
    return words[:_LONGEST].rstrip() or _MALFORMED
