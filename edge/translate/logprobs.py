"""Log probabilities in the forms of the two APIs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

from common.events import TokenLogprobs
from common.tokenization.tokenizer import Tokenizer
from edge.openai.completions import CompletionLogprobs

LOWEST: Final = -9999.0  # in place of minus infinity, which is not JSON


def finite(logprob: float) -> float:
    """``logprob``, or the lowest figure that is shown."""
    return logprob if math.isfinite(logprob) else LOWEST


class TokenNames:
    """How tokens are written in logprobs. A token that is not whole characters is written ``bytes:\\xf0\\x9f``."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        spelled = self._tokenizer.token_bytes(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def spelled(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token_id))


def chat_entries(
    names: TokenNames, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[dict[str, Any]]:
    """One entry a token, with exactly the alternatives that were asked for, the most likely first."""
    return [
        {
            **_chat_token(names, token_id, entry.logprob),
            "top_logprobs": [
                _chat_token(names, top_id, top) for top_id, top in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ],
        }
        for token_id, entry in zip(token_ids, logprobs, strict=False)
    ]


def _chat_token(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": names.name(token_id), "logprob": finite(logprob), "bytes": names.spelled(token_id)}


class CompletionEntries:
    """The four lists of one choice; offsets go on from chunk to chunk."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0

    def lists(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]) -> CompletionLogprobs:
        """A position without logprobs (a prompt's first) has null in their place."""
        result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token_id, entry in zip(token_ids, logprobs, strict=False):
            name = self._names.name(token_id)
            result.tokens.append(name)
            result.text_offset.append(self._offset)
            result.token_logprobs.append(None if entry is None else finite(entry.logprob))
            result.top_logprobs.append(None if entry is None else self._top(token_id, entry))
            self._offset += len(name)
        return result

    def _top(self, token_id: int, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens, and the token itself if it is not among them."""
        top = {self._names.name(top_id): finite(value) for top_id, value in _top_pairs(entry)}
        top.setdefault(self._names.name(token_id), finite(entry.logprob))
        return top


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Two runs of positions as one."""
    return CompletionLogprobs(
        text_offset=first.text_offset + second.text_offset,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        tokens=first.tokens + second.tokens,
        top_logprobs=first.top_logprobs + second.top_logprobs,
    )


def prompt_entries(
    names: TokenNames, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """For each prompt token: itself and the most likely ones, by token id; null for the first."""
    result: list[dict[str, Any] | None] = []
    for token_id, entry in zip(token_ids, logprobs, strict=False):
        if entry is None:
            result.append(None)
            continue
        shown = {
            str(top_id): _prompt_token(names, top_id, value, rank)
            for rank, (top_id, value) in enumerate(_top_pairs(entry), start=1)
        }
        shown.setdefault(str(token_id), _prompt_token(names, token_id, entry.logprob, entry.rank))
        result.append(shown)
    return result


def _prompt_token(names: TokenNames, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": names.name(token_id)}


def _top_pairs(entry: TokenLogprobs) -> Iterator[tuple[int, float]]:
    return zip(entry.top_ids, entry.top_logprobs, strict=True)
