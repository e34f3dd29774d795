"""What a weight format costs in quality: perplexity, and agreement with fp32, through the engine itself.

    python -m bench.quality [--model demo] [--modes fp32,bf16,int8,int4,int4+kv8] [--text FILE] [--json FILE]

One text is scored by prompt log probabilities: perplexity, how often the most likely next token is that of fp32, and
how far the text's own log probabilities move. Then a few of its beginnings are continued greedily: how many tokens
agree with fp32 before the first difference. One short text finds what is broken; it does not rank formats that are
close to each other. Where the model file is quantised already, every mode starts from these rounded weights: then the
rows show what computing costs, not what the first rounding did. +kv8: keys and values are kept as int8.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Final, Literal

from common.events import SamplingParams, TokenLogprobs
from common.tokenization.tokenizer import Tokenizer
from engine_worker.assembly import Assembly, EngineSettings, load_engine
from engine_worker.config import ComputeSettings, KvCacheSettings, ModelSettings, SchedulerSettings
from engine_worker.sequence import Sequence as EngineSequence

TEXT: Final = Path(__file__).parents[1] / "tests" / "data" / "harbour.txt"
_CONTINUED: Final = 64  # tokens
_BEGINNING: Final = 24  # tokens

_Dtype = Literal["auto", "float32", "bfloat16"]
_Format = Literal["auto", "none", "int8", "int4"]
_KvDtype = Literal["auto", "bfloat16", "int8"]
MODES: Final[dict[str, tuple[_Dtype, _Format, _KvDtype]]] = {
    "fp32": ("float32", "none", "auto"),
    "fp32+kv8": ("float32", "none", "int8"),
    "bf16": ("bfloat16", "none", "bfloat16"),
    "bf16+kv8": ("bfloat16", "none", "int8"),
    "int8": ("bfloat16", "int8", "bfloat16"),
    "int8+kv8": ("bfloat16", "int8", "int8"),
    "int4": ("bfloat16", "int4", "bfloat16"),
    "int4+kv8": ("bfloat16", "int4", "int8"),
}
REFERENCE: Final = "fp32"


@dataclass(frozen=True, slots=True)
class Scores:
    """What one mode says about the text."""

    text: tuple[TokenLogprobs, ...]  # of each token but the first, with the most likely one
    answers: tuple[tuple[int, ...], ...]  # greedy continuations of the beginnings
    backend: str


@dataclass(frozen=True, slots=True)
class Quality:
    """One mode against the reference."""

    mode: str
    backend: str
    perplexity: float
    top1_agreement: float  # share of positions whose most likely token is the reference's
    mean_shift: float  # of |log p - reference's log p| of the text's tokens
    agreed_tokens: float  # mean length of the greedy continuation that agrees, of _CONTINUED
    agreed_answers: int  # continuations that agree to their end
    num_answers: int


def score(model: str, mode: str, text: str, backend: Literal["native", "torch"]) -> Scores:
    """Load ``model`` in ``mode`` and ask it. The model is gone again when this returns."""
    dtype, quantization, kv_cache_dtype = MODES[mode]
    parts = load_engine(
        EngineSettings(
            ModelSettings(
                model=model,
                dtype=dtype,
                quantization=quantization,
                kv_cache_dtype=kv_cache_dtype,
                max_model_len=2048,
            ),
            ComputeSettings(backend=backend),
            SchedulerSettings(max_num_seqs=16),
            KvCacheSettings(kv_cache_memory_bytes=512 << 20),
        )
    )
    tokenizer = Tokenizer.from_json(parts.model.tokenizer_json, parts.model.tokenizer_config)
    beginnings = [tokenizer.encode(part)[:_BEGINNING] for part in text.split("\n\n")]
    scored, *continued = _run(
        parts,
        [
            _sequence(parts, 0, tokenizer.encode(text), SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)),
            *(
                _sequence(parts, i, ids, SamplingParams(max_tokens=_CONTINUED, temperature=0, ignore_eos=True))
                for i, ids in enumerate(beginnings, start=1)
            ),
        ],
    )
    return Scores(scored[0], tuple(answer for _, answer in continued), parts.model.backend)


def against(mode: str, scores: Scores, reference: Scores) -> Quality:
    """``scores`` of ``mode`` beside those of the reference."""
    pairs = list(zip(scores.text, reference.text, strict=True))
    agreed = [_agreed(ours, theirs) for ours, theirs in zip(scores.answers, reference.answers, strict=True)]
    return Quality(
        mode=mode,
        backend=scores.backend,
        perplexity=math.exp(-fmean(token.logprob for token in scores.text)),
        top1_agreement=fmean(ours.top_ids[0] == theirs.top_ids[0] for ours, theirs in pairs),
        mean_shift=fmean(abs(ours.logprob - theirs.logprob) for ours, theirs in pairs),
        agreed_tokens=fmean(agreed),
        agreed_answers=sum(length == _CONTINUED for length in agreed),
        num_answers=len(agreed),
    )


def _sequence(parts: Assembly, number: int, ids: Sequence[int], sampling: SamplingParams) -> EngineSequence:
    return EngineSequence(
        seq_id=number,
        request_id=f"quality-{number}",
        choice=0,
        prompt_token_ids=tuple(ids),
        sampling=sampling,
        max_model_len=parts.plan.max_model_len,
    )


def _run(
    parts: Assembly, sequences: Sequence[EngineSequence]
) -> list[tuple[tuple[TokenLogprobs, ...], tuple[int, ...]]]:
    """(scores of the prompt, output) of each sequence."""
    prompts: dict[int, list[TokenLogprobs]] = {sequence.seq_id: [] for sequence in sequences}
    parts.engine.add(sequences)
    while parts.engine.has_work:
        for scores in parts.engine.step(time.time()).prompt_logprobs:
            prompts[scores.sequence.seq_id] += scores.logprobs
    return [(tuple(prompts[sequence.seq_id]), sequence.output_token_ids()) for sequence in sequences]


def _agreed(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=True)))


def table(rows: Sequence[Quality]) -> str:
    """Markdown."""
    lines = [
        "| mode | perplexity | top-1 as fp32 | mean shift of log p | greedy tokens agreed | whole answers agreed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.mode} ({row.backend}) | {row.perplexity:.3f} | {row.top1_agreement:.3f} | {row.mean_shift:.4f} "
        f"| {row.agreed_tokens:.1f} of {_CONTINUED} | {row.agreed_answers} of {row.num_answers} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}; fp32 is always the reference")
    parser.add_argument("--backend", choices=("native", "torch"), default="native")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    modes = [mode for mode in arguments.modes.split(",") if mode != REFERENCE]
    if unknown := sorted(set(modes) - set(MODES)):
        parser.error(f"modes: {', '.join(unknown)}: not of {', '.join(MODES)}")
    text = arguments.text.read_text(encoding="utf-8").strip()
    reference = score(arguments.model, REFERENCE, text, arguments.backend)
    rows = [against(REFERENCE, reference, reference)]
    rows += [against(mode, score(arguments.model, mode, text, arguments.backend), reference) for mode in modes]
    print(f"{arguments.text.name}, {len(reference.text) + 1} tokens, {time.strftime('%Y-%m-%d')}\n\n{table(rows)}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
