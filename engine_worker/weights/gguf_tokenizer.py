"""A GGUF file's vocabulary as tokenizer.json and tokenizer_config.json.

llama.cpp names the way a text is cut before its merges (``tokenizer.ggml.pre``); the same cuts are spelled out here.
A name that is not known is refused: a wrong cut gives tokens the model was never trained on, and nobody would notice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from common.errors import CheckpointMismatch, UnsupportedModel


class _Kind(IntEnum):
    """Token types of GGUF."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_LLAMA3_CUT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_CUT: Final = _LLAMA3_CUT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_CUT: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _cut_by(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, _byte_level(use_regex=False)]


@dataclass(frozen=True, slots=True)
class _Cut:
    """What happens to a text before its merges."""

    steps: Sequence[dict[str, Any]]
    ignores_merges: bool = False  # a piece that is a token is one, whatever the merges make of it
    normalizer: str | None = None
    adds_bos: bool = False  # where the file does not say


_GPT2: Final = _Cut([_byte_level(use_regex=True)])
_DIGITS: Final = _Cut([{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)])
_LLAMA3: Final = _Cut(_cut_by(_LLAMA3_CUT), ignores_merges=True, adds_bos=True)
_QWEN2: Final = _Cut(_cut_by(_QWEN2_CUT), normalizer="NFC")
_TEKKEN: Final = _Cut(_cut_by(_TEKKEN_CUT), ignores_merges=True, adds_bos=True)

_CUTS: Final[Mapping[str, _Cut]] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "mpt": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "command-r": _DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


def tokenizer_files(metadata: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
    """tokenizer.json (encoded) and tokenizer_config.json of a GGUF file's metadata.

    Raises `UnsupportedModel` for a tokenizer of another kind than byte-level BPE (``gpt2``) and SentencePiece BPE
    (``llama``), and for an unknown pre-tokenizer; `CheckpointMismatch` when parts are missing.
    """
    vocabulary = _Vocabulary.of(metadata)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        parts, adds_bos = _byte_level_bpe(metadata, vocabulary)
    elif kind == "llama":
        parts, adds_bos = _sentencepiece_bpe(metadata, vocabulary), True
    else:
        raise UnsupportedModel(
            f"tokenizer.ggml.model {kind!r} is not served; served: gpt2 (byte-level BPE), llama (SentencePiece BPE)",
            param="model",
        )
    config = _tokenizer_config(metadata, vocabulary.tokens, adds_bos=adds_bos)
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        "post_processor": _post_processor(config, vocabulary.ids),
        **parts,
    }
    return json.dumps(tokenizer, ensure_ascii=False).encode(), config


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    kinds: list[int]
    ids: dict[str, int]

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> _Vocabulary:
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not tokens:
            raise CheckpointMismatch("the GGUF file has no vocabulary (tokenizer.ggml.tokens)", param="model")
        kinds = metadata.get("tokenizer.ggml.token_type") or [_Kind.NORMAL] * len(tokens)
        if len(kinds) != len(tokens):
            raise CheckpointMismatch("tokenizer.ggml.token_type and .tokens differ in length", param="model")
        return cls(tokens, kinds, {token: i for i, token in enumerate(tokens)})

    def added_tokens(self) -> list[dict[str, Any]]:
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        added = (_Kind.CONTROL, _Kind.USER_DEFINED, _Kind.UNKNOWN)
        return [
            {"id": i, "content": token, **plain, "special": kind != _Kind.USER_DEFINED}
            for i, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind in added
        ]


def _byte_level_bpe(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    cut = _CUTS.get(name)
    if cut is None:
        raise UnsupportedModel(
            f"pre-tokenizer {name!r} (tokenizer.ggml.pre) is not served; served: {', '.join(_CUTS)}", param="model"
        )
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise CheckpointMismatch("the GGUF file has no tokenizer.ggml.merges", param="model")
    steps = list(cut.steps)
    parts = {
        "normalizer": {"type": cut.normalizer} if cut.normalizer else None,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "decoder": _byte_level(use_regex=True),
        "model": _bpe(vocabulary, [merge.split(" ", 1) for merge in merges], ignore_merges=cut.ignores_merges),
    }
    return parts, cut.adds_bos


def _sentencepiece_bpe(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise CheckpointMismatch("the GGUF file has no score for each token (tokenizer.ggml.scores)", param="model")
    spaces: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizer = spaces
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        normalizer = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = _bpe(vocabulary, _merges_from_scores(vocabulary, scores))
    model |= {"unk_token": vocabulary.tokens[unknown], "fuse_unk": True, "byte_fallback": True}
    return {
        "normalizer": normalizer,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _bpe(vocabulary: _Vocabulary, merges: list[list[str]], *, ignore_merges: bool = False) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


def _merges_from_scores(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[list[str]]:
    """SentencePiece merges whichever two neighbours make the piece of the highest score: all ways to make each piece,
    best piece first."""
    ids = vocabulary.ids
    made = [
        (token, scores[i])
        for i, token in enumerate(vocabulary.tokens)
        if len(token) > 1 and vocabulary.kinds[i] == _Kind.NORMAL
    ]
    made.sort(key=lambda item: -item[1])
    merges: list[list[str]] = []
    for token, _ in made:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
        merges.extend(list(pair) for pair in sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]])))
    return merges


def _tokenizer_config(metadata: Mapping[str, Any], tokens: Sequence[str], *, adds_bos: bool) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(metadata.get(f"{architecture}.context_length", 0)) or None,
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    return config


def _post_processor(config: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any] | None:
    """BOS before and EOS after every text, where the model wants them."""
    before = [config["bos_token"]] if config["add_bos_token"] and "bos_token" in config else []
    after = [config["eos_token"]] if config["add_eos_token"] and "eos_token" in config else []
    if not before and not after:
        return None

    def template(name: str, type_id: int) -> list[dict[str, Any]]:
        def special(tokens: list[str]) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": token, "type_id": type_id}} for token in tokens]

        return [*special(before), {"Sequence": {"id": name, "type_id": type_id}}, *special(after)]

    special_tokens = {
        token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in dict.fromkeys([*before, *after])
    }
    return {
        "type": "TemplateProcessing",
        "single": template("A", 0),
        "pair": template("A", 0) + template("B", 1),
        "special_tokens": special_tokens,
    }
