"""What is sent: prompts of exact length cut from real prose, lengths, arrival times. A function of the seed alone."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Final, Literal

from tokenizers import Tokenizer

from common.errors import ConfigError

_MIN_WORDS: Final = 2000
_CHARS_PER_TOKEN: Final = 4.5  # of English prose, where no tokenizer is at hand


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths, written ``128``, ``64-256`` (uniform) or ``16,128,1024`` (one of these)."""

    text: str
    low: int
    high: int
    choices: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises ValueError for anything that is not one of the three forms or not positive."""
        if match := re.fullmatch(r"(\d+)-(\d+)", text):
            low, high = int(match[1]), int(match[2])
        else:
            choices = tuple(int(part) for part in text.split(","))
            if min(choices) < 1:
                raise ValueError(f"lengths must be at least 1: {text!r}")
            return cls(text, min(choices), max(choices), choices)
        if not 1 <= low <= high:
            raise ValueError(f"a range needs 1 <= low <= high: {text!r}")
        return cls(text, low, high)

    def draw(self, rng: random.Random) -> int:
        return rng.choice(self.choices) if self.choices else rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class Workload:
    """A closed loop under a name. ``prompt_tokens`` is the whole prompt; beside a system prompt, the user's part."""

    concurrency: int
    requests: int
    prompt_tokens: str
    output_tokens: str
    system_tokens: int = 0


WorkloadName = Literal["A", "B", "C", "D", "E"]
WORKLOADS: Final[Mapping[WorkloadName, Workload]] = {
    "A": Workload(1, 6, "128", "128"),
    "B": Workload(8, 24, "128", "128"),
    "C": Workload(32, 64, "128", "128"),
    "D": Workload(16, 48, "64", "64", system_tokens=512),
    "E": Workload(4, 8, "1500", "32"),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One request. ``at_s``: when it is sent, from the start of the run (open loop), None in a closed loop."""

    prompt: str
    output_tokens: int
    at_s: float | None = None


class Prose:
    """Cuts texts of a wanted number of tokens out of prose: a file, or the language reference that Python ships."""

    def __init__(self, *, corpus: Path | None = None, tokenizer: Path | None = None) -> None:
        if corpus is None:
            text = "\n\n".join(topics.topics[key] for key in sorted(topics.topics))
        else:
            text = corpus.read_text(encoding="utf-8", errors="replace")
        self._words = _words_of_prose(text)
        if len(self._words) < _MIN_WORDS:
            raise ConfigError(f"corpus: too little prose ({len(self._words)} words, {_MIN_WORDS} are needed)")
        self._tokenizer = None if tokenizer is None else Tokenizer.from_file(str(tokenizer))
        self._chars_per_token = _CHARS_PER_TOKEN

    @property
    def is_exact(self) -> bool:
        """Whether lengths are counted by a tokenizer, not estimated."""
        return self._tokenizer is not None

    def count(self, text: str) -> int:
        """Tokens of ``text``, without special ones."""
        if self._tokenizer is not None:
            return len(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return round(len(text) / self._chars_per_token)

    def calibrate(self, chars_per_token: float) -> None:
        """What the server's own count of a prompt has shown; only an estimate takes notice."""
        self._chars_per_token = chars_per_token

    def words(self, rng: random.Random, number: int) -> str:
        start = rng.randrange(len(self._words))
        return " ".join(self._words[(start + i) % len(self._words)] for i in range(number))

    def cut(self, rng: random.Random, tokens: int) -> str:
        """A text of ``tokens`` tokens. Raises `ConfigError` when there is no room for a text at all."""
        if tokens < 1:
            raise ConfigError("prompt_tokens: too short to hold the chat template around the prompt")
        if self._tokenizer is None:
            chars = int(tokens * self._chars_per_token)
            return self.words(rng, chars // 2 + 2)[:chars].strip() or "Hi"
        for _ in range(100):
            ids = self._tokenizer.encode(self.words(rng, tokens + 8), add_special_tokens=False).ids
            text: str = self._tokenizer.decode(ids[:tokens]).strip()
            if self.count(text) == tokens:
                return text
        raise ConfigError(f"prompt_tokens: could not cut a text of exactly {tokens} tokens")


def arrivals(rng: random.Random, number: int, rate_per_s: float, burstiness: float = 1.0) -> list[float]:
    """Seconds from the start at which ``number`` requests arrive: gamma-distributed gaps with mean 1 / rate.

    ``burstiness`` is the shape: 1 is a Poisson process, below it arrivals come in bursts, above it more evenly.
    """
    now, times = 0.0, []
    for _ in range(number):
        times.append(now)
        now += rng.gammavariate(burstiness, 1.0 / (rate_per_s * burstiness))
    return times


def _words_of_prose(text: str) -> list[str]:
    """The words of paragraphs that are not mostly markup, tables or code."""
    words: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text):
        line = " ".join(paragraph.split())
        letters = sum(c.isalpha() or c == " " for c in line)
        if len(line) >= 80 and letters >= 0.9 * len(line):
            words += line.split(" ")
    return words
