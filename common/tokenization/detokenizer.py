"""Token ids -> text, as they come."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Set
from typing import Final

from common.tokenization.pieces import LeadingSpace, PieceTable

_new_decoder: Final = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Incremental decoding of one choice.

    The concatenated deltas are the decoded text of all tokens fed; a character is given out when its last byte has
    come, never before. Bytes that can never become a character are given out as U+FFFD at once; an incomplete
    character at the end is not given out at all, so a finished answer has the same text streamed or not. Resuming is
    feeding the earlier ids to a new instance and dropping what it returns. Linear in the number of tokens.
    """

    __slots__ = ("_decode", "_leading", "_piece", "_skip")

    def __init__(self, pieces: PieceTable, skip: Set[int] = frozenset()) -> None:
        """``skip``: ids that add no text (special tokens, when they are to be skipped)."""
        self._piece: Callable[[int], bytes] = pieces.piece
        self._decode: Callable[..., str] = _new_decoder("replace").decode
        self._skip = skip
        self._leading = pieces.leading_space

    def feed(self, token_id: int) -> str:
        """The text that one more token completes; may be empty."""
        if token_id in self._skip:
            return ""
        piece = self._piece(token_id)
        if self._leading is not LeadingSpace.KEEP:
            piece = self._strip_leading(piece)
        return self._decode(piece)

    def feed_all(self, token_ids: Iterable[int]) -> str:
        """The text that several more tokens complete."""
        return "".join(map(self.feed, token_ids))

    def flush_replaced(self) -> str:
        """An incomplete character at the end as U+FFFD: for showing single tokens and parts of texts."""
        return self._decode(b"", True)

    def _strip_leading(self, piece: bytes) -> bytes:
        if not piece:
            return piece
        once = self._leading is LeadingSpace.STRIP_ONE
        self._leading = LeadingSpace.KEEP
        return piece.removeprefix(b" ") if once else piece.replace(b" ", b"")
