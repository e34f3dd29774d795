"""Keeping control tokens that a client typed apart from those of the chat template.

A *break* is a private-use character that occurs in no string of the conversation. Before rendering it is put inside
everything in the client's strings that reads as a control token, and after everything that reads as the beginning of
one; no control token is read across a break, and the breaks are gone before anything is tokenised. Text without
control tokens is not touched at all, so templates may trim, split and compare it as they like.

Tokenising has to tell the two kinds apart as well. `isolated` makes a tokenizer whose control tokens have unguessable
names: the template's markers are translated to these names, what the client typed is ordinary text to it, and
normalisation, merges and white space around markers are the tokenizer's own, in one pass over the whole prompt.
"""

from __future__ import annotations

import copy
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_PRIVATE_USE: Final = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A conversation as the template renders it. ``marked`` holds ``separator`` inside what a client typed to look
    like a control token; ``text`` is the prompt without these breaks."""

    marked: str
    separator: str

    @property
    def text(self) -> str:
        return self.marked.replace(self.separator, "")

    @property
    def has_typed_control_tokens(self) -> bool:
        return self.separator in self.marked


class ControlTokens:
    """The control tokens of one tokenizer, as they are spelled."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.tokens = tuple(sorted({token for token in tokens if len(token) > 1}, key=len, reverse=True))
        alternatives = "|".join(map(re.escape, self.tokens)) or r"(?!)"
        self._any = re.compile(alternatives)
        # Every place where one begins, overlapping ones too: the break goes after the first character.
        self._begins = re.compile(rf"(?=(?:{alternatives}))(.)", re.DOTALL)
        self._beginnings = frozenset(token[:i] for token in self.tokens for i in range(1, len(token)))
        self._longest = max(map(len, self.tokens), default=0)

    def guard(self, text: str, separator: str) -> str:
        """``text`` with breaks, so that no control token can be read in it, or in it and what follows it."""
        guarded = self._begins.sub(rf"\1{separator}", text) if self._any.search(text) else text
        longest = min(self._longest, len(text) + 1)
        if any(text[-i:] in self._beginnings for i in range(1, longest)):
            guarded += separator
        return guarded

    def rename(self, text: str, names: Mapping[str, str]) -> str:
        """``text`` with each control token replaced by its name; those with a break inside are not found."""
        return self._any.sub(lambda found: names[found[0]], text)


def unused_separator(strings: Iterable[str]) -> str:
    """A private-use character that is in none of ``strings``."""
    used = set().union(*strings)
    return next(character for character in map(chr, _PRIVATE_USE) if character not in used)


def strings_in(value: object) -> Iterator[str]:
    """Every string in a JSON-like value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_in(key)
            yield from strings_in(item)
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for item in value:
            yield from strings_in(item)


def isolated(tokenizer_json: Mapping[str, Any], control_tokens: Iterable[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """A tokenizer.json in which ``control_tokens`` have unguessable names, and the names by token."""
    secret = "".join(chr(0xE000 + byte) for byte in secrets.token_bytes(12))
    names = {token: f"{secret}{i}{secret[0]}" for i, token in enumerate(control_tokens)}
    result = copy.deepcopy(dict(tokenizer_json))
    for added in result.get("added_tokens", []):
        added["content"] = names.get(added["content"], added["content"])
    model = result["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in vocab.items()}
    else:  # Unigram: pairs of token and score
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return result, names
