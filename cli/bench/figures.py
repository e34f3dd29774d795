"""From the times of each request to the figures of a run. The definitions stand at the fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

PERCENTILES: Final = (50, 90, 95, 99)


@dataclass(slots=True)
class Outcome:
    """One request as the client saw it. Times in seconds of one monotonic clock."""

    sent_s: float
    first_s: float | None = None  # first chunk that carries text
    last_s: float | None = None  # last chunk that carries text
    ended_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between neighbouring chunks that carry text
    num_chunks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    has_usage: bool = False
    finish_reason: str | None = None
    text: str = ""
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        if self.first_s is None or self.last_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Spread:
    """A set of times in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        if not seconds:
            return None
        p50, p90, p95, p99 = (1000 * percentile(seconds, p) for p in PERCENTILES)
        return cls(1000 * sum(seconds) / len(seconds), p50, p90, p95, p99)


@dataclass(frozen=True, slots=True)
class Objective:
    """A service level: a request is good when it ended well and kept within every bound given, in seconds."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def is_met(self, outcome: Outcome) -> bool:
        if outcome.error is not None:
            return False
        pairs = (
            (self.ttft_s, outcome.ttft_s),
            (self.tpot_s, outcome.tpot_s),
            (self.e2e_s, outcome.ended_s - outcome.sent_s),
        )
        return all(bound is None or value is None or value <= bound for bound, value in pairs)


@dataclass(frozen=True, slots=True)
class Figures:
    """A run. Rates are over the wall time from the first request sent to the last answer ended."""

    num_requests: int
    num_errors: int
    errors: dict[str, int]
    wall_s: float
    requests_per_s: float
    goodput_per_s: float  # requests that met the objective
    output_tokens_per_s: float  # by the server's usage; by chunks where it sends none
    total_tokens_per_s: float  # prompt and output
    prompt_tokens_mean: float
    cached_tokens_mean: float
    output_tokens_mean: float
    tokens_per_chunk: float  # above 1, ITL is a gap between chunks rather than tokens
    num_without_usage: int
    ttft_ms: Spread | None  # from just before the request is sent to the first chunk with text
    itl_ms: Spread | None  # between neighbouring chunks with text
    tpot_ms: Spread | None  # (last - first chunk) / (output tokens - 1) of a request
    e2e_ms: Spread | None  # from sending to the end of the answer

    def as_json(self) -> dict[str, object]:
        return asdict(self)


def summarise(outcomes: Sequence[Outcome], objective: Objective) -> Figures:
    """The figures of a run of at least one request."""
    good = [o for o in outcomes if o.error is None]
    wall_s = max(o.ended_s for o in outcomes) - min(o.sent_s for o in outcomes)
    output = sum(o.output_tokens for o in good)
    prompt = sum(o.prompt_tokens for o in good)
    chunks = sum(o.num_chunks for o in good)
    num_good = max(1, len(good))
    return Figures(
        num_requests=len(outcomes),
        num_errors=len(outcomes) - len(good),
        errors=dict(Counter(o.error for o in outcomes if o.error is not None).most_common(5)),
        wall_s=wall_s,
        requests_per_s=len(good) / wall_s,
        goodput_per_s=sum(objective.is_met(o) for o in outcomes) / wall_s,
        output_tokens_per_s=output / wall_s,
        total_tokens_per_s=(output + prompt) / wall_s,
        prompt_tokens_mean=prompt / num_good,
        cached_tokens_mean=sum(o.cached_tokens for o in good) / num_good,
        output_tokens_mean=output / num_good,
        tokens_per_chunk=output / chunks if chunks else 0.0,
        num_without_usage=sum(not o.has_usage for o in good),
        ttft_ms=Spread.of([o.ttft_s for o in good if o.ttft_s is not None]),
        itl_ms=Spread.of([gap for o in good for gap in o.gaps_s]),
        tpot_ms=Spread.of([o.tpot_s for o in good if o.tpot_s is not None]),
        e2e_ms=Spread.of([o.ended_s - o.sent_s for o in good]),
    )


def percentile(values: Sequence[float], p: float) -> float:
    """Linear interpolation between the closest ranks; ``values`` is not empty."""
    ranked = sorted(values)
    at = (len(ranked) - 1) * p / 100
    low = int(at)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (at - low)
