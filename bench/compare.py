"""Headrace beside other servers of this machine, in turn, in one run: only ratios of one run mean anything.

    python -m bench.compare [--modes int4,int8,bf16] [--workloads A,B,C,D,E] [--rounds 2] [--minutes 20] [--json FILE]
    python -m bench.compare --together [--only headrace-int4,llama-q4_1]    # all up at once, workload by workload
    python -m bench.compare --front-door [--modes int4]     # the engine alone against the way through the front door

Peers are what is found on PATH, among our own packages and in the directory given by --peers, whose layout
docs/benchmarks.md describes. One at a time they run in the order A B C, C B A, ...: each is started, goes through the
workloads and ends. With --together all are started first, and each workload goes through all of them before the next
one: turns that are compared lie seconds apart; who is not measured is stopped (Headrace is not: it idles). The client,
the prompts and the workloads are those of `headrace bench serve`. A figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Final

from bench.contenders import Contender, Live, Load, served
from bench.ending import end_in_order
from bench.front_door import front_door
from bench.peers import Places, find_peers
from bench.servers import FORMATS, ServerFailed, headrace
from bench.standings import Results, default_baseline, duels, table
from cli.bench.workload import WORKLOADS, WorkloadName
from cli.model_import import ensure_demo_model
from common.errors import HeadraceError

_PEERS: Final = Path(".headrace/peers")


class Comparison:
    """Contenders, the workloads they go through, and what has come of it so far."""

    def __init__(self, contenders: Sequence[Contender], arguments: argparse.Namespace) -> None:
        self.results = Results()
        self._contenders = contenders
        self._arguments = arguments
        self._deadline: float = time.monotonic() + 60 * arguments.minutes

    def one_at_a_time(self) -> None:
        """Each contender is started, goes through the workloads and ends; the next round goes the other way."""
        for turn in range(self._arguments.rounds):
            for contender in self._order(turn):
                if self._is_over() or contender.name in self.results.failures:
                    continue
                with ExitStack() as stack:
                    if (live := self._start(contender, stack)) is not None:
                        for workload in self._arguments.workloads:
                            self._measure(contender, live, workload, turn)

    def together(self) -> None:
        """All are started; each workload goes through all of them, there and back, before the next one does."""
        with ExitStack() as stack:
            live: dict[str, Live] = {}
            for contender in self._contenders:
                if (started := self._start(contender, stack)) is not None:
                    started.pause()
                    live[contender.name] = started
            for workload in self._arguments.workloads:
                for turn in range(self._arguments.rounds):
                    for contender in self._order(turn):
                        if contender.name in live and contender.name not in self.results.failures:
                            live[contender.name].resume()
                            self._measure(contender, live[contender.name], workload, turn)
                            live[contender.name].pause()

    def _order(self, turn: int) -> list[Contender]:
        return list(self._contenders if turn % 2 == 0 else reversed(self._contenders))

    def _is_over(self) -> bool:
        return time.monotonic() > self._deadline

    def _start(self, contender: Contender, stack: ExitStack) -> Live | None:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-compare-")))
        try:
            live = stack.enter_context(contender.open(directory))
        except ServerFailed as error:
            self.results.add_failure(contender.name, error)
            return None
        self.results.start_s.setdefault(contender.name, []).append(live.start_s)
        return live

    def _measure(self, contender: Contender, live: Live, workload: WorkloadName, turn: int) -> None:
        if self._is_over() or workload not in contender.workloads or contender.name in self.results.failures:
            return
        seed = self._arguments.seed + turn  # another one each round: no prefix cache answers for the last
        tokenizer = self._arguments.model_dir / "tokenizer.json"
        try:
            sample = live.measure(Load(workload, seed, self._arguments.share, tokenizer))
        except (ServerFailed, HeadraceError) as error:
            self.results.add_failure(contender.name, error)
        else:
            self.results.add(workload, contender.name, sample)


def contenders(arguments: argparse.Namespace) -> list[Contender]:
    """Headrace in every mode, then the peers. Raises SystemExit for a name in --only that is none of them."""
    ours = [served(headrace(mode, arguments.model_dir)) for mode in arguments.modes]
    gguf = arguments.gguf or arguments.model_dir / "model.gguf"
    found = ours + find_peers(Places(arguments.peers, (gguf,) if gguf.is_file() else (), arguments.hf_dir))
    if unknown := set(arguments.only) - {contender.name for contender in found}:
        raise SystemExit(f"not found here: {', '.join(sorted(unknown))}; {', '.join(one.name for one in found)} are")
    return [contender for contender in found if not arguments.only or contender.name in arguments.only]


def compare(arguments: argparse.Namespace) -> Results:
    """Every contender in turn, ``rounds`` times, until all is measured or time is up."""
    comparison = Comparison(contenders(arguments), arguments)
    if arguments.together:
        comparison.together()
    else:
        comparison.one_at_a_time()
    return comparison.results


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", type=_listed(tuple(FORMATS)), default=["int4", "int8", "bf16"])
    parser.add_argument("--workloads", type=_listed(tuple(WORKLOADS)), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=20.0, help="nothing new is measured after so long")
    parser.add_argument("--share", type=float, default=1.0, help="of each workload's requests, for shorter runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--together", action="store_true", help="all up at once: their memory must fit together")
    parser.add_argument(
        "--only", type=_listed(()), default=[], help="names of the contenders; none: all that are found"
    )
    parser.add_argument("--baseline", default="", help="contender that ratios refer to; empty: the first peer found")
    parser.add_argument("--model-dir", type=Path, help="imported model with tokenizer.json; none: the demo model")
    parser.add_argument("--peers", type=Path, default=_PEERS, help=f"directory of peers; {_PEERS} if not given")
    parser.add_argument("--gguf", type=Path, help="what llama.cpp loads; none: model.gguf of the model directory")
    parser.add_argument("--hf-dir", type=Path, help="safetensors directory of the same model; none: models/bf16 there")
    parser.add_argument("--json", type=Path, help="write every sample here")
    parser.add_argument("--front-door", action="store_true", help="the engine in process against headrace serve")
    return parser.parse_args(argv)


def _listed(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """``allowed``: the only names there are; empty: any."""

    def names(text: str) -> list[str]:
        found = [name for name in text.split(",") if name]
        if allowed and (unknown := sorted(set(found) - set(allowed))):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(allowed)}")
        return found

    return names


def _front_door(arguments: argparse.Namespace) -> object:
    reports = {
        mode: front_door(
            mode,
            arguments.model_dir,
            rounds=arguments.rounds,
            seed=arguments.seed,
            minutes=arguments.minutes,
        )
        for mode in arguments.modes
    }
    for mode, report in reports.items():
        print(f"== headrace-{mode}\n{report}")
    return {mode: asdict(report) for mode, report in reports.items()}


def _compared(arguments: argparse.Namespace) -> object:
    results = compare(arguments)
    baseline = arguments.baseline or default_baseline(results)
    print("\n".join([*table(results, baseline), *duels(results)]))
    starts = (f"{name} {median(times):.1f} s" for name, times in results.start_s.items() if any(times))
    print("start to first answer: " + ", ".join(starts))
    return {"baseline": baseline, **asdict(results)}


def main() -> None:
    arguments = parse()
    end_in_order()
    arguments.model_dir = arguments.model_dir or ensure_demo_model(Path(".headrace/models"), print)
    content = _front_door(arguments) if arguments.front_door else _compared(arguments)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(content, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
