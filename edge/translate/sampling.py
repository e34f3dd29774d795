"""Sampling fields to `SamplingParams`. Order of defaults: the request, the model's generation_config, the API's."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Final

from common.errors import InvalidRequest
from common.events import Grammar, SamplingParams
from common.model_card import ModelCard
from common.tokenization.tokenizer import Tokenizer
from edge.openai.decoding import echo
from edge.openai.sampling import GenerationFields
from edge.translate.bounds import check_float, check_int, check_token_ids, refuse

MIN_TEMPERATURE: Final = 0.01  # below it, but not 0, logits overflow and the draw is greedy anyway
MAX_REPETITION_PENALTY: Final = 1000.0
MAX_BAD_WORD_SEQUENCES: Final = 128
MAX_STOP_CHARS: Final = 1024
MAX_LOGIT_BIASES: Final = 4096
MAX_STOP_TOKEN_IDS: Final = 256
LOGIT_BIAS_BOUND: Final = 100.0
_SEED_LOW, _SEED_HIGH = -(2**63), 2**64 - 1


@dataclass(frozen=True, slots=True)
class Budget:
    """Output tokens of a request: ``max_tokens`` as granted, and as asked for under the name ``param``."""

    max_tokens: int
    asked: int | None
    param: str


@dataclass(frozen=True, slots=True)
class Reporting:
    """What is to be reported about tokens, and the constraint on the text."""

    logprobs: int | None
    prompt_logprobs: int | None
    grammar: Grammar | None
    skip_special_tokens: bool


def sampling_params(
    body: GenerationFields,
    card: ModelCard,
    tokenizer: Tokenizer,
    budget: Budget,
    reporting: Reporting,
    max_stop_strings: int,
) -> SamplingParams:
    """Raises `InvalidRequest` naming the first field that is out of its range."""
    defaults = card.generation_defaults
    repetition = _first(body.repetition_penalty, defaults.repetition_penalty, 1.0)
    sampling = SamplingParams(
        max_tokens=budget.max_tokens,
        seed=_seed(body.seed),
        temperature=_temperature(_first(body.temperature, defaults.temperature, 1.0)),
        top_p=check_float("top_p", _first(body.top_p, defaults.top_p, 1.0), 0.0, 1.0, open_low=True),
        top_k=_top_k(body.top_k if body.top_k is not None else defaults.top_k or 0, card.vocab_size),
        min_p=check_float("min_p", _first(body.min_p, defaults.min_p, 0.0), 0.0, 1.0),
        repetition_penalty=check_float("repetition_penalty", repetition, 0.0, MAX_REPETITION_PENALTY, open_low=True),
        presence_penalty=check_float("presence_penalty", _first(body.presence_penalty, None, 0.0), -2.0, 2.0),
        frequency_penalty=check_float("frequency_penalty", _first(body.frequency_penalty, None, 0.0), -2.0, 2.0),
        logit_bias=_logit_bias(body.logit_bias, card.vocab_size),
        allowed_token_ids=_allowed(body.allowed_token_ids, card.vocab_size),
        bad_words_token_ids=_bad_words(body.bad_words or [], tokenizer),
        min_tokens=_min_tokens(body.min_tokens, budget),
        eos_token_ids=card.eos_token_ids,
        stop_token_ids=_stop_token_ids(body.stop_token_ids or [], card.vocab_size),
        ignore_eos=body.ignore_eos,
        stop=_stop(body.stop, max_stop_strings),
        include_stop_str_in_output=body.include_stop_str_in_output,
        skip_special_tokens=reporting.skip_special_tokens,
        logprobs=reporting.logprobs,
        prompt_logprobs=reporting.prompt_logprobs,
        grammar=reporting.grammar,
    )
    _check_a_token_is_left(sampling)
    return sampling


def _check_a_token_is_left(sampling: SamplingParams) -> None:
    """What is allowed must not all be forbidden by other fields: the first step would find nothing to draw."""
    if not sampling.allowed_token_ids:
        return
    forbidden = {word[0] for word in sampling.bad_words_token_ids if len(word) == 1}
    if sampling.min_tokens:
        forbidden.update(sampling.eos_token_ids, sampling.stop_token_ids)
    if forbidden.issuperset(sampling.allowed_token_ids):
        raise InvalidRequest(
            "allowed_token_ids leaves no token: min_tokens and bad_words forbid all of them", param="allowed_token_ids"
        )


def output_budget(asked: int | None, param: str, room: int, default: int | None) -> Budget:
    """More than fits is no error: clients send the context length here. ``room``: tokens left in the context."""
    if asked is not None and asked < 1:
        raise refuse(param, "must be at least 1", asked)
    wanted = asked if asked is not None else default
    return Budget(room if wanted is None else min(wanted, room), asked, param)


def _first(given: float | None, model_default: float | None, listed: float) -> float:
    if given is not None:
        return given
    return listed if model_default is None else model_default


def _temperature(value: float) -> float:
    check_float("temperature", value, 0.0, 2.0)
    return MIN_TEMPERATURE if 0.0 < value < MIN_TEMPERATURE else value


def _top_k(value: int, vocab_size: int) -> int:
    if value < -1:
        raise refuse("top_k", "must be 0 or -1 (off), or at least 1", value)
    return 0 if value >= vocab_size else max(0, value)


def _seed(value: int | None) -> int:
    if value is None or value == -1:
        return secrets.randbits(64)
    return check_int("seed", value, _SEED_LOW, _SEED_HIGH) % 2**64


def _min_tokens(value: int, budget: Budget) -> int:
    if value < 0:
        raise refuse("min_tokens", "must be at least 0", value)
    if budget.asked is not None and value > budget.asked:
        raise refuse("min_tokens", f"must not be above {budget.param} ({echo(budget.asked)})", value)
    return min(value, budget.max_tokens)


def _stop(value: str | list[str] | None, max_stop_strings: int) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(value or ())
    if len(stops) > max_stop_strings:
        raise InvalidRequest(f"stop takes at most {max_stop_strings} strings, got {len(stops)}", param="stop")
    if "" in stops:
        raise InvalidRequest("stop must not contain an empty string", param="stop")
    for text in stops:
        if len(text) > MAX_STOP_CHARS:
            raise InvalidRequest(
                f"a stop string has at most {MAX_STOP_CHARS} characters, got one of {len(text)}", param="stop"
            )
    return stops


def _stop_token_ids(token_ids: list[int], vocab_size: int) -> tuple[int, ...]:
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids, got {len(token_ids)}", param="stop_token_ids"
        )
    return check_token_ids("stop_token_ids", token_ids, vocab_size)


def _allowed(token_ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    if token_ids is None:
        return ()
    if not token_ids:
        raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")
    return tuple(sorted(set(check_token_ids("allowed_token_ids", token_ids, vocab_size))))


def _logit_bias(biases: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    if not biases:
        return {}
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidRequest(
            f"logit_bias takes at most {MAX_LOGIT_BIASES} tokens, got {len(biases)}", param="logit_bias"
        )
    keys = {key: _token_id(key) for key in biases}
    wrong = [key for key, token_id in keys.items() if token_id is None]
    if wrong:
        raise InvalidRequest(f"logit_bias keys must be token ids, got {echo(wrong)}", param="logit_bias")
    outside = [key for key, token_id in keys.items() if token_id is not None and not token_id < vocab_size]
    if outside:
        raise InvalidRequest(
            f"logit_bias: token ids {echo(outside)} are out of vocabulary (0 to {vocab_size - 1})", param="logit_bias"
        )
    result: dict[int, float] = {}
    for key, bias in biases.items():
        token_id = keys[key]
        if token_id is not None:
            if math.isnan(bias):
                raise refuse("logit_bias", "values must be numbers", bias)
            result[token_id] = max(-LOGIT_BIAS_BOUND, min(LOGIT_BIAS_BOUND, bias))
    return result


def _token_id(key: str) -> int | None:
    """ASCII digits only: int() would take "1_0", " 1" and digits of other scripts."""
    return int(key) if key.isascii() and key.isdigit() and len(key) <= 20 else None


def _bad_words(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelled at the beginning of a text and after a space."""
    if len(words) > MAX_BAD_WORD_SEQUENCES:
        raise InvalidRequest(
            f"bad_words takes at most {MAX_BAD_WORD_SEQUENCES} words, got {len(words)}", param="bad_words"
        )
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip():
            raise refuse("bad_words", "must not contain an empty word", word)
        for text in (word, " " + word.lstrip()):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False, allow_special=False))
            if not token_ids:
                raise refuse("bad_words", "must contain words that the tokenizer knows", word)
            sequences[token_ids] = None
    if len(sequences) > MAX_BAD_WORD_SEQUENCES:
        raise InvalidRequest(
            f"bad_words make {len(sequences)} token sequences, the limit is {MAX_BAD_WORD_SEQUENCES}",
            param="bad_words",
        )
    return tuple(sequences)
