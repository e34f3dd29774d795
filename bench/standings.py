"""What a comparison has brought: every sample, and the tables made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from bench.contenders import Sample

OURS: Final = "headrace"
PAIRS: Final = (("headrace-bf16", "vllm-bf16"), ("headrace-int4", "llama-q4_1"))  # the same weights on both sides
_Choice = Callable[[str], bool]


@dataclass(slots=True)
class Results:
    samples: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)  # by workload, then by contender
    start_s: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, workload: str, name: str, sample: Sample) -> None:
        self.samples.setdefault(workload, {}).setdefault(name, []).append(sample)
        print(
            f"{workload} {name:<20}{sample.output_tokens_per_s:>9.1f} tok/s  TTFT {sample.ttft_p50_ms:>7.0f} ms  "
            f"ITL {sample.itl_p50_ms:>6.1f} ms  others {sample.other_cores:.2f} cores"
            + (f"  {sample.errors} FAILED" if sample.errors else ""),
            flush=True,
        )

    def add_failure(self, name: str, error: Exception) -> None:
        """``name`` is left out from now on."""
        self.failures[name] = str(error)
        print(f"{name} failed: {error}", flush=True)


@dataclass(frozen=True, slots=True)
class Medians:
    """Of one contender at one workload, over the rounds."""

    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50_ms: float
    itl_p50_ms: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Medians:
        return cls(
            median(sample.output_tokens_per_s for sample in samples),
            median(sample.total_tokens_per_s for sample in samples),
            median(sample.ttft_p50_ms for sample in samples),
            median(sample.itl_p50_ms for sample in samples),
        )

    def over(self, other: Medians) -> str:
        """``x tok/s  x TTFT  x ITL``: rates and latencies as multiples of the other's; a dash where it has none."""
        pairs = (
            (self.output_tokens_per_s, other.output_tokens_per_s),
            (self.ttft_p50_ms, other.ttft_p50_ms),
            (self.itl_p50_ms, other.itl_p50_ms),
        )
        return "".join(f"{mine / theirs:>9.2f}" if theirs else f"{'-':>9}" for mine, theirs in pairs)


def table(results: Results, baseline: str) -> list[str]:
    """Medians, and each contender's rates and latencies as multiples of the baseline's."""
    head = f"{'':2}{'':<20}{'tok/s':>9}{'total/s':>9}{'TTFT ms':>9}{'ITL ms':>8}  x tok/s   x TTFT    x ITL"
    lines = [f"{head}   (of {baseline})"]
    for workload, contenders in sorted(results.samples.items()):
        base = Medians.of(contenders[baseline]) if baseline in contenders else None
        for name, samples in contenders.items():
            own = Medians.of(samples)
            line = f"{workload:2}{name:<20}{own.output_tokens_per_s:>9.1f}{own.total_tokens_per_s:>9.1f}"
            line += f"{own.ttft_p50_ms:>9.1f}{own.itl_p50_ms:>8.2f}"
            lines.append(line + (own.over(base) if base is not None else ""))
    return lines


def duels(results: Results) -> list[str]:
    """Headrace over a peer with the same weights, and the best of ours over the best peer, whatever its format."""
    lines = [f"{'':2}{'':<44}  x tok/s   x TTFT    x ITL"]
    for workload, contenders in sorted(results.samples.items()):
        of_names = {name: Medians.of(samples) for name, samples in contenders.items()}
        best = (_fastest(of_names, _is_ours), _fastest(of_names, lambda name: not _is_ours(name)))
        for ours, theirs in (*PAIRS, best):
            if ours in of_names and theirs in of_names:
                label = f"{ours} / {theirs}" + (" (best)" if (ours, theirs) is best or (ours, theirs) == best else "")
                lines.append(f"{workload:2}{label:<44}{of_names[ours].over(of_names[theirs])}")
    return lines if len(lines) > 1 else []


def default_baseline(results: Results) -> str:
    """The first peer that was measured, else the first contender."""
    names = list(dict.fromkeys(name for contenders in results.samples.values() for name in contenders))
    return next((name for name in names if not _is_ours(name)), names[0] if names else OURS)


def _is_ours(name: str) -> bool:
    return name.startswith(OURS)


def _fastest(of_names: dict[str, Medians], is_wanted: _Choice) -> str:
    rates = {name: medians.output_tokens_per_s for name, medians in of_names.items() if is_wanted(name)}
    return max(rates, key=rates.__getitem__, default="")
