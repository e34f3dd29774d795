"""Keeps a number in JSON from going on without end: digits are a place where models, small ones above all, get stuck.

JSON sets numbers no length, so no grammar of ours stops one. Whether the next digit would still be in a number is seen
in what may come instead of it: a closing bracket, a comma or the end, and no quotation mark, as within a string.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer

MAX_DIGITS: Final = 24  # more than a float of 64 bits tells apart, with the zeros before them
_DIGITS: Final = b"0123456789"
_GOES_ON: Final = _DIGITS + b"eE"
_ENDS: Final = (b",", b"}", b"]")

Words = npt.NDArray[np.int32]


class DigitTokens:
    """Which tokens of a vocabulary make a number longer, and which say that it may end. Immutable."""

    def __init__(self, tokenizer: LLTokenizer, eos_token_ids: tuple[int, ...]) -> None:
        num_words = -(-tokenizer.vocab_size // 32)
        texts = [tokenizer.decode_bytes([token_id]) for token_id in range(tokenizer.vocab_size)]
        longer = np.zeros(num_words * 32, dtype=np.uint8)
        longer[: len(texts)] = [text != b"" and text[:1] in _GOES_ON for text in texts]
        self._others: Words = ~np.packbits(longer, bitorder="little").view(np.int32)
        self._quotes = [token_id for token_id, text in enumerate(texts) if text == b'"']
        self._ends = [token_id for token_id, text in enumerate(texts) if text in _ENDS] + list(eos_token_ids)

    def stop(self, mask: Words) -> None:
        """Take the digits out of ``mask``, one bit a token, where they would only make a number longer."""
        in_string = any(_allows(mask, token_id) for token_id in self._quotes)
        if not in_string and any(_allows(mask, token_id) for token_id in self._ends):
            mask &= self._others


def digits_at_the_end(text: bytes, before: int) -> int:
    """Length of the run of digits that ends after ``text``; ``before``: of the one that ended before it."""
    rest = len(text.rstrip(_DIGITS))
    return len(text) - rest if rest else before + len(text)


def _allows(mask: Words, token_id: int) -> bool:
    return bool(mask[token_id >> 5] >> (token_id & 31) & 1)
