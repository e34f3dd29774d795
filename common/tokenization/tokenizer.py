"""Text <-> token ids, from the two files that every model brings: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, Final

import tokenizers

from common.errors import ConfigError, InvalidRequest
from common.tokenization.control_tokens import ControlTokens, RenderedPrompt, isolated
from common.tokenization.detokenizer import Detokenizer
from common.tokenization.pieces import PieceTable

_TEMPLATE_VARIABLES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """One model's tokenizer. Immutable; may be used from several threads at once."""

    def __init__(self, tokenizer_json: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """``tokenizer_json`` and ``config``: the parsed files. Raises `ConfigError` when they cannot be used."""
        self._json = _with_added_tokens(tokenizer_json, config)
        self._tokenizer = _build(self._json)
        self._pieces = PieceTable(self._json, self._tokenizer.get_vocab(with_added_tokens=True))
        special = {token["content"]: token["id"] for token in self._json["added_tokens"] if token["special"]}
        self.special_ids: frozenset[int] = frozenset(special.values())
        self.control_tokens = ControlTokens(special)
        self.special_tokens: dict[str, str] = _template_variables(config)
        bos = self.special_tokens.get("bos_token")
        self._forced_bos = self.token_id(bos) if bos and config.get("add_bos_token") is True else None

    @classmethod
    def from_json(cls, tokenizer_json: bytes, config: Mapping[str, Any] | None = None) -> Tokenizer:
        """From the bytes of tokenizer.json and the parsed tokenizer_config.json.

        Raises `ConfigError` when the file is malformed or its decoder is of a kind that cannot be streamed.
        """
        try:
            parsed = json.loads(tokenizer_json)
        except ValueError as error:
            raise ConfigError(f"tokenizer.json is not JSON: {error}") from error
        return cls(parsed, config or {})

    @property
    def vocab_size(self) -> int:
        """One more than the highest token id; a model's logits may have more rows."""
        return self._pieces.size

    def encode(self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True) -> list[int]:
        """Token ids of ``text``.

        ``add_special_tokens``: with what the model wants around every text (BOS, ...). ``allow_special``: control
        tokens that are spelled out in ``text`` become these tokens; otherwise they stay text. Raises `InvalidRequest`
        for a text that is not Unicode (half a surrogate pair).
        """
        tokenizer = self._tokenizer if allow_special else self._isolated[0]
        ids = _ids(tokenizer, text, add_special_tokens=add_special_tokens)
        if add_special_tokens and self._forced_bos is not None and ids[:1] != [self._forced_bos]:
            ids.insert(0, self._forced_bos)
        return ids

    def encode_rendered(self, prompt: RenderedPrompt) -> list[int]:
        """Token ids of a rendered conversation, in which only the template's own markers become control tokens."""
        if not prompt.has_typed_control_tokens:
            return self.encode(prompt.text, add_special_tokens=False)
        tokenizer, names = self._isolated
        renamed = self.control_tokens.rename(prompt.marked, names).replace(prompt.separator, "")
        return _ids(tokenizer, renamed, add_special_tokens=False)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``token_ids``; bytes that are no character, an incomplete end too, are shown as U+FFFD."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.feed_all(token_ids) + detokenizer.flush_replaced()

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A new incremental decoder."""
        return Detokenizer(self._pieces, self.special_ids if skip_special_tokens else frozenset())

    def token_id(self, token: str) -> int | None:
        """Id of a token in the vocabulary's own spelling."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text; special tokens as they are spelled. Empty for unknown ids."""
        return self._pieces.piece(token_id)

    def token_text(self, token_id: int) -> str:
        """`token_bytes` for display: half a character is shown as U+FFFD."""
        return self._pieces.piece(token_id).decode(errors="replace")

    @cached_property
    def _isolated(self) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
        """Built when a client first types a control token: it costs as much memory as the tokenizer itself."""
        renamed, names = isolated(self._json, self.control_tokens.tokens)
        return _build(renamed), names


def _ids(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        # Of the library's ways to encode this is the one that lets other threads run meanwhile, and the fastest: it
        # leaves out the offsets.
        (encoded,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
    except TypeError as error:  # what the library says of surrogates, which JSON can spell but UTF-8 cannot
        raise InvalidRequest("the text holds half of a surrogate pair") from error
    return ids


def _build(parsed: Mapping[str, Any]) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(parsed))
    except Exception as error:  # the library raises nothing more special
        raise ConfigError(f"tokenizer.json cannot be used: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _with_added_tokens(parsed: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """tokenizer.json with the tokens that only tokenizer_config.json declares."""
    added = list(parsed.get("added_tokens") or [])
    known = {token["content"] for token in added}
    defaults = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    for token_id, declared in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0])):
        if declared["content"] not in known:
            added.append({"id": int(token_id), **defaults, **{k: declared[k] for k in declared if k in defaults}})
            added[-1]["content"] = declared["content"]
    return {**parsed, "added_tokens": added}


def _template_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens, as chat templates refer to them; each is a string or an object with ``content``."""
    named = {name: config[name] for name in _TEMPLATE_VARIABLES if config.get(name)}
    return {name: token["content"] if isinstance(token, Mapping) else str(token) for name, token in named.items()}
