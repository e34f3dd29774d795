"""What can be compared: a server under its load, or an engine in a process of its own, behind one small interface."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, Protocol

from tokenizers import Tokenizer

from bench.servers import Running, Server, ServerFailed, descendants, running
from cli.bench.figures import Figures, Objective, Outcome, summarise
from cli.bench.machine import Disturbance, cpu_s
from cli.bench.serve import BenchServeSettings, run, settled
from cli.bench.workload import WORKLOADS, Lengths, Prose, Workload, WorkloadName
from cli.supervisor import die_with

_WARMUP: Final = 4  # requests, as many as the load of a server has
_OPENVINO: Final = Path(__file__).with_name("openvino_in_process.py")
Tokens = list[tuple[list[int], int]]  # prompt, and how many tokens are to be put out


@dataclass(frozen=True, slots=True)
class Sample:
    """What is compared of one run of one workload."""

    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50_ms: float
    itl_p50_ms: float
    errors: int
    other_cores: float

    @classmethod
    def of(cls, figures: Figures, other_cores: float) -> Sample:
        return cls(
            figures.output_tokens_per_s,
            figures.total_tokens_per_s,
            figures.ttft_ms.p50 if figures.ttft_ms else 0.0,
            figures.itl_ms.p50 if figures.itl_ms else 0.0,
            figures.num_errors,
            other_cores,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """One run: which workload, drawn from which seed, which share of its requests."""

    workload: WorkloadName
    seed: int
    share: float
    tokenizer: Path

    @property
    def num_requests(self) -> int:
        return scaled(WORKLOADS[self.workload], self.share)


class Live(Protocol):
    """A contender that is up."""

    start_s: float  # from starting it to its first answer; 0 where each run starts anew

    def measure(self, load: Load) -> Sample:
        """Raises `ServerFailed` and `HeadraceError`."""
        ...

    def pause(self) -> None:
        """Stop its processes where they are, so that another one has the machine for itself."""
        ...

    def resume(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to be compared. ``open`` is given a directory for its files and raises `ServerFailed`."""

    name: str
    open: Callable[[Path], AbstractContextManager[Live]]
    workloads: frozenset[str] = frozenset(WORKLOADS)


def scaled(workload: Workload, share: float) -> int:
    """Requests of a shortened run: never fewer than run at the same time."""
    return max(workload.concurrency, round(share * workload.requests))


def served(server: Server) -> Contender:
    """A server under the load of `headrace bench serve`."""

    @contextmanager
    def opened(directory: Path) -> Iterator[Live]:
        with running(server, directory) as live:
            served_live = _Served(live, can_pause=not server.name.startswith("headrace"))
            try:
                yield served_live
            finally:
                served_live.resume()  # what is stopped does not hear that it is to end

    return Contender(server.name, opened)


def llama_in_process(gguf: Path) -> Contender:
    """llama-cpp-python without a server, one request at a time: workload A only."""

    @contextmanager
    def opened(_directory: Path) -> Iterator[Live]:
        yield _LlamaInProcess(gguf)

    return Contender("llama-in-process", opened, frozenset("A"))


def openvino(name: str, python: Path, model: Path) -> Contender:
    """OpenVINO GenAI's continuous batching in a process of ``python``, an interpreter that has it; no HTTP, no text."""

    @contextmanager
    def opened(directory: Path) -> Iterator[Live]:
        directory.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        with (directory / "output.log").open("wb") as log, _piped([str(python), str(_OPENVINO), str(model)], log) as it:
            live = _OpenVino(it, directory / "output.log")
            live.answer()
            live.start_s = time.perf_counter() - started
            yield live

    return Contender(name, opened)


def token_jobs(load: Load, prose: Prose, tokenizer: Tokenizer) -> tuple[Tokens, Tokens]:
    """(warm-up, what is measured) as token ids, of the lengths that the workload has with a server."""
    workload, rng = WORKLOADS[load.workload], random.Random(load.seed)
    system = _ids(prose, tokenizer, rng, workload.system_tokens) if workload.system_tokens else []
    lengths = Lengths.parse(workload.prompt_tokens), Lengths.parse(workload.output_tokens)

    def job() -> tuple[list[int], int]:
        return system + _ids(prose, tokenizer, rng, lengths[0].draw(rng)), lengths[1].draw(rng)

    return [job() for _ in range(_WARMUP)], [job() for _ in range(load.num_requests)]


def outcome_of(prompt_tokens: int, sent_s: float, token_s: Sequence[float]) -> Outcome:
    """A request as its token times show it. A step may bring several tokens at once: they are one chunk."""
    chunks = sorted(set(token_s))
    return Outcome(
        sent_s=sent_s,
        first_s=chunks[0],
        last_s=chunks[-1],
        ended_s=chunks[-1],
        gaps_s=[later - earlier for earlier, later in itertools.pairwise(chunks)],
        num_chunks=len(chunks),
        prompt_tokens=prompt_tokens,
        output_tokens=len(token_s),
        has_usage=True,
        finish_reason="length",
    )


def _ids(prose: Prose, tokenizer: Tokenizer, rng: random.Random, number: int) -> list[int]:
    ids: list[int] = tokenizer.encode(prose.cut(rng, number), add_special_tokens=False).ids
    return ids


class _Served:
    def __init__(self, live: Running, *, can_pause: bool) -> None:
        """``can_pause``: not for Headrace, whose workers would lose their leases; idle, it takes next to nothing."""
        self.start_s = live.start_s
        self._live = live
        self._can_pause = can_pause

    def measure(self, load: Load) -> Sample:
        settings = settled(BenchServeSettings(url=self._live.url, bench_model=self._live.model, workload=load.workload))
        settings = settings.model_copy(
            update={"bench_tokenizer": load.tokenizer, "bench_seed": load.seed, "requests": load.num_requests}
        )
        before, started = sum(self._live.cpu_by_part().values()), time.perf_counter()
        others = Disturbance()
        # llama.cpp's server announces that it keeps connections, and closes them after a stream.
        figures, _, _ = asyncio.run(run(settings, keep_alive=False))
        used = (sum(self._live.cpu_by_part().values()) - before) / (time.perf_counter() - started)
        return Sample.of(figures, max(0.0, others.cores() - used))

    def pause(self) -> None:
        if self._can_pause:
            _signal_all(self._live.process_id, signal.SIGSTOP)

    def resume(self) -> None:
        if self._can_pause:
            _signal_all(self._live.process_id, signal.SIGCONT)


class _LlamaInProcess:
    def __init__(self, gguf: Path) -> None:
        self.start_s = 0.0
        self._gguf = gguf

    def measure(self, load: Load) -> Sample:
        with tempfile.TemporaryDirectory(prefix="headrace-compare-") as directory:
            out = Path(directory) / "out.json"
            options = ["--seed", str(load.seed), "--requests", str(load.num_requests)]
            command = [sys.executable, "-m", "bench.llama_in_process", str(self._gguf), str(out), *options]
            others, before = Disturbance(), os.times()
            try:
                subprocess.run(command, check=True, capture_output=True)
            except subprocess.CalledProcessError as error:
                raise ServerFailed(error.stderr.decode(errors="replace")[-2000:]) from error
            now = os.times()
            used = now.children_user + now.children_system - before.children_user - before.children_system
            other_cores = max(0.0, others.cores() - used / (now.elapsed - before.elapsed))
            figures = json.loads(out.read_text(encoding="utf-8"))
        return Sample(
            figures["output_tokens_per_s"],
            figures["total_tokens_per_s"],
            figures["ttft_ms"]["p50"],
            figures["itl_ms"]["p50"],
            figures["num_errors"],
            other_cores,
        )

    def pause(self) -> None:
        """Nothing of it runs between two measurements."""

    def resume(self) -> None:
        """See `pause`."""


class _OpenVino:
    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.start_s = 0.0
        self._process = process
        self._log = log

    def answer(self) -> Any:
        """The next line. Raises `ServerFailed` when the process has ended instead."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise ServerFailed(f"OpenVINO ended: {self._log.read_text(errors='replace')[-2000:]}")
        return json.loads(line)

    def measure(self, load: Load) -> Sample:
        tokenizer = Tokenizer.from_file(str(load.tokenizer))
        warmup, jobs = token_jobs(load, Prose(tokenizer=load.tokenizer), tokenizer)
        concurrency = WORKLOADS[load.workload].concurrency
        self._ask(warmup, concurrency)
        before, others = cpu_s(self._process.pid), Disturbance()
        started = time.perf_counter()
        outcomes = [
            outcome_of(len(ids), times["sent_s"], times["token_s"])
            for (ids, _), times in zip(jobs, self._ask(jobs, concurrency), strict=True)
        ]
        used = (cpu_s(self._process.pid) - before) / (time.perf_counter() - started)
        return Sample.of(summarise(outcomes, Objective()), max(0.0, others.cores() - used))

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def _ask(self, jobs: Tokens, concurrency: int) -> list[dict[str, Any]]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"concurrency": concurrency, "jobs": jobs}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self.answer()  # says what it ended with
        outcomes: list[dict[str, Any]] = self.answer()["outcomes"]
        return outcomes


@contextmanager
def _piped(command: list[str], log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        preexec_fn=partial(die_with, os.getpid()),  # should we be killed
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # whatever it is doing, and stopped or not: it holds nothing that is worth an orderly end


def _signal_all(process_id: int, number: signal.Signals) -> None:
    for one in descendants(process_id):
        with suppress(ProcessLookupError):
            os.kill(one, number)
