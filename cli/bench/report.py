"""A run's figures as a table, and its requests over time as one self-contained SVG picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from cli.bench.figures import Figures, Outcome, Spread


def table(title: str, figures: Figures) -> str:
    """Lines for a terminal."""
    rows = [
        ("requests", f"{figures.num_requests}, {figures.num_errors} failed, {figures.wall_s:.1f} s"),
        ("prompt tokens", f"{figures.prompt_tokens_mean:.0f} mean, {figures.cached_tokens_mean:.0f} of them cached"),
        ("output tokens", f"{figures.output_tokens_mean:.0f} mean, {figures.tokens_per_chunk:.2f} a chunk"),
        ("requests/s", f"{figures.requests_per_s:.2f}"),
        ("goodput requests/s", f"{figures.goodput_per_s:.2f}"),
        ("output tokens/s", f"{figures.output_tokens_per_s:.1f}"),
        ("total tokens/s", f"{figures.total_tokens_per_s:.1f}"),
        ("", "mean      p50      p90      p95      p99"),
        ("TTFT ms", _spread(figures.ttft_ms)),
        ("ITL ms", _spread(figures.itl_ms)),
        ("TPOT ms", _spread(figures.tpot_ms)),
        ("E2E ms", _spread(figures.e2e_ms)),
    ]
    lines = [f"== {title}", *(f"{name:<20}{value}" for name, value in rows)]
    lines += [f"failed x{number}: {text}" for text, number in figures.errors.items()]
    if figures.num_without_usage:
        lines.append(f"note: {figures.num_without_usage} answers had no usage; their output tokens are chunks")
    return "\n".join(lines)


def timeline_svg(title: str, outcomes: Sequence[Outcome]) -> str:
    """One bar a request: waiting for the first token in grey, streaming in blue, a failure in red."""
    start = min(o.sent_s for o in outcomes)
    span = max(o.ended_s for o in outcomes) - start or 1.0
    width, row = 1000, 6
    height = row * len(outcomes)

    def x(at: float) -> float:
        return width * (at - start) / span

    bars = []
    for i, o in enumerate(sorted(outcomes, key=lambda o: o.sent_s)):
        first = o.first_s if o.first_s is not None else o.ended_s
        pieces = [(o.sent_s, first, "#c0c0c0"), (first, o.ended_s, "#2f6fdf")] if o.error is None else []
        for begin, end, colour in pieces or [(o.sent_s, o.ended_s, "#d03030")]:
            box = f'x="{x(begin):.2f}" y="{i * row}" width="{max(0.5, x(end) - x(begin)):.2f}" height="{row - 1}"'
            bars.append(f'<rect {box} fill="{colour}"/>')
    ticks = "".join(
        f'<text x="{width * i / 10:.0f}" y="{height + 14}" font-size="11">{span * i / 10:.1f} s</text>'
        for i in range(10)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -20 {width + 40} {height + 40}" font-family="sans-serif">'
        f'<text y="-6" font-size="13">{escape(title)}: waiting (grey), streaming (blue), failed (red)</text>'
        f"{''.join(bars)}{ticks}</svg>\n"
    )


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return "".join(f"{value:<9.2f}" for value in (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99))
