"""The bytes of each token: what decoding means for the two families of tokenizers that generate text.

Byte-level BPE writes each byte as one printable character; SentencePiece-like tokenizers write a space as ``▁`` and
bytes without a piece as ``<0xE4>``. In both, the text of a sequence is the concatenation of its tokens' bytes, read
as UTF-8. That makes decoding incremental, linear and independent of where the tokens are cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from enum import Enum, auto
from typing import Any, Final

from common.errors import ConfigError

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NO_OPS: Final = frozenset({"Fuse"})


class LeadingSpace(Enum):
    """What decoding does to the space at the very start of a text."""

    KEEP = auto()
    STRIP_ONE = auto()
    STRIP_FIRST_PIECE = auto()  # every space of the first token


def _byte_alphabet() -> dict[str, int]:
    """Printable stand-in of each byte in byte-level BPE: printable Latin-1 as itself, the rest from U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in set(printable))
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_BYTE_OF: Final = _byte_alphabet()


class PieceTable:
    """Token id -> bytes, computed at first use and kept."""

    def __init__(self, tokenizer_json: Mapping[str, Any], vocabulary: Mapping[str, int]) -> None:
        """``vocabulary``: token -> id, added tokens included. Raises `ConfigError` for an unknown decoder."""
        self._tokens = {token_id: token for token, token_id in vocabulary.items()}
        self._pieces: dict[int, bytes] = {}
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self.leading_space = LeadingSpace.KEEP
        for decoder in _flat(tokenizer_json.get("decoder")):
            self._take(decoder)

    @property
    def size(self) -> int:
        """One more than the highest id."""
        return max(self._tokens, default=-1) + 1

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling, or None for an id without a token."""
        return self._tokens.get(token_id)

    def piece(self, token_id: int) -> bytes:
        """The bytes the token adds to a text; empty for an id without a token (padding rows of the logits)."""
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = self._spell(self._tokens.get(token_id, ""))
        return found

    def _take(self, decoder: Mapping[str, Any]) -> None:
        match decoder:
            case {"type": "ByteLevel"}:
                self._byte_level = True
            case {"type": "ByteFallback"}:
                self._byte_fallback = True
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                self._replacements.append((pattern, content))
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                self.leading_space = LeadingSpace.STRIP_ONE if start else LeadingSpace.KEEP
            case {"type": "Metaspace", "replacement": str(replacement)}:
                self._replacements.append((replacement, " "))
                keeps = decoder.get("prepend_scheme", "always") == "never" or decoder.get("add_prefix_space") is False
                self.leading_space = LeadingSpace.KEEP if keeps else LeadingSpace.STRIP_FIRST_PIECE
            case {"type": str(kind)} if kind in _NO_OPS:
                pass
            case _:
                raise ConfigError(f"tokenizer.json: decoder {decoder.get('type')!r} is not supported")

    def _spell(self, token: str) -> bytes:
        if self._byte_level:
            try:
                return bytes([_BYTE_OF[character] for character in token])
            except KeyError:  # an added token with characters outside the alphabet stands for itself
                return token.encode()
        if self._byte_fallback and (hexadecimal := _BYTE_PIECE.fullmatch(token)):
            return bytes([int(hexadecimal[1], 16)])
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        return token.encode()


def _flat(decoder: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if decoder is None:
        raise ConfigError("tokenizer.json has no decoder: its tokens cannot be turned into text")
    if decoder.get("type") == "Sequence":
        for inner in decoder["decoders"]:
            yield from _flat(inner)
    else:
        yield decoder
