"""A tokenizer for the fake runner's vocabulary, a log in memory, and a worker's inside driven step by step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
import tokenizers
from tokenizers import decoders, models

from common.errors import LogUnavailable
from common.events import (
    CancelReason,
    EngineRequest,
    FinishReason,
    Milestone,
    OutputEvent,
    Recorded,
    SamplingParams,
    Started,
)
from common.telemetry.metrics import WorkerMetrics
from common.telemetry.tracing import Tracing
from common.tokenization.tokenizer import Tokenizer
from common.transport.records import AppendItem, AppendOutcome, AppendStatus, Owned
from engine_worker.handoff import Add, Commands, Drop, Finish, StepReports
from engine_worker.output_stage import OutputStage
from engine_worker.reporting import Reporting
from engine_worker.resume import Resumer
from tests.unit.engine_worker.fake_runner import VOCAB_SIZE
from tests.unit.engine_worker.worlds import MAX_MODEL_LEN, World


@cache
def fake_tokenizer() -> Tokenizer:
    """Every id of the fake runner is a piece of a text with characters of all lengths, cut anywhere."""
    return Tokenizer.from_json(fake_tokenizer_json(), {})


@cache
def fake_tokenizer_json() -> bytes:
    alphabet = {byte: symbol for symbol, byte in _byte_symbols()}
    source = ("ab c\n漢字é🦊x" * 40).encode()
    rng = random.Random(7)
    pieces: dict[str, int] = {alphabet[byte]: byte for byte in range(256)}
    while len(pieces) < VOCAB_SIZE:
        start, size = rng.randrange(len(source) - 8), rng.randrange(2, 8)
        pieces.setdefault("".join(alphabet[b] for b in source[start : start + size]), len(pieces))
        if rng.random() < 0.2:
            pieces.setdefault("".join(rng.choices("abcdefgh", k=4)), len(pieces))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=dict(list(pieces.items())[:VOCAB_SIZE]), merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str().encode()


def _byte_symbols() -> list[tuple[str, int]]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [(chr(b), b) for b in printable] + [(chr(256 + i), b) for i, b in enumerate(others)]


def request(
    request_id: str = "0-r1", *, prompt: Sequence[int] = (1, 2, 3), n: int = 1, **sampling: Any
) -> EngineRequest:
    prompts = sampling.pop("prompts", (tuple(prompt),))
    deadline_s, priority = sampling.pop("deadline_s", None), sampling.pop("priority", 0)
    return EngineRequest(
        request_id=request_id,
        model="tiny",
        prompts=prompts,
        n=n,
        sampling=SamplingParams(**{"max_tokens": 12, **sampling}),
        arrival_s=1.0,
        deadline_s=deadline_s,
        priority=priority,
    )


@dataclass
class MemoryLog:
    """The log's answers to one worker, in memory. ``outages`` appends fail first; ``epochs`` fence."""

    streams: dict[str, list[OutputEvent]] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    cancels: dict[str, CancelReason] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    calls: list[list[AppendItem]] = field(default_factory=list)
    outages: int = 0

    async def append(self, items: Sequence[AppendItem]) -> list[AppendOutcome]:
        if self.outages:
            self.outages -= 1
            raise LogUnavailable("away")
        self.calls.append(list(items))
        return [self._append(item) for item in items]

    async def release(self, request_id: str) -> bool:
        self.released.append(request_id)
        return True

    def _append(self, item: AppendItem) -> AppendOutcome:
        stream = self.streams.setdefault(item.request_id, [])
        status = AppendStatus.APPENDED
        if self.epochs.get(item.request_id, item.epoch) != item.epoch:
            status = AppendStatus.FENCED
        elif len(stream) >= item.first_n - 1 + len(item.events):
            status = AppendStatus.DUPLICATE
        elif len(stream) < item.first_n - 1:
            status = AppendStatus.GAP
        else:
            stream += item.events[len(stream) - item.first_n + 1 :]
        return AppendOutcome(item.request_id, status, len(stream), self.cancels.get(item.request_id))


class Inside:
    """Engine, output stage and resumer of a worker, without its threads: `turn` is one step and one append."""

    def __init__(self, log: MemoryLog | None = None, **world: Any) -> None:
        self.log = log or MemoryLog()
        self.world = World(**world)
        self.commands = Commands()
        self.reports = StepReports(1000)
        self.metrics = WorkerMetrics("tiny")
        self.stage = OutputStage(self.log, self.commands, self.reports, Reporting(self.metrics, Tracing.off(), "w"))
        next_id: Callable[[], int] = itertools.count(1).__next__
        self.resumer = Resumer(fake_tokenizer(), "w", MAX_MODEL_LEN, next_id)

    def own(self, engine_request: EngineRequest, epoch: int = 1, events: Sequence[OutputEvent] = ()) -> None:
        recorded = tuple(Recorded(n, event) for n, event in enumerate(events, start=1))
        self.log.streams[engine_request.request_id] = list(events)
        owned = Owned(engine_request, epoch, len(events), recorded, None, 0, 0.0)
        resumed = self.resumer.resume(owned, now=2.0)
        self.stage.adopt(resumed)
        if resumed.sequences:
            self.commands.put(Add(engine_request.request_id, resumed.sequences))

    async def write(self) -> None:
        self.stage.stop()
        await self.stage.run()

    async def turn(self) -> None:
        self._obey()
        if self.world.engine.has_work:
            self.reports.put(self.world.step())
        await self.write()
        self._obey()

    async def run(self, limit: int = 500) -> None:
        await self.write()
        for _ in range(limit):
            await self.turn()
            if not self.world.engine.has_work and not self.stage.live:
                return
        raise AssertionError("it does not come to an end")

    def _obey(self) -> None:
        while not self.commands.empty():
            match self.commands.get():
                case Add(sequences=sequences):
                    self.world.add(*sequences)
                case Drop(request_id=request_id):
                    self.world.engine.cancel(request_id)
                case Finish(sequence=sequence, stop=stop):
                    self.world.engine.finish(sequence, FinishReason.STOP, stop)


def visible(events: Sequence[OutputEvent]) -> list[OutputEvent]:
    """What is left when nothing of time and ownership is: the events that clients see."""
    kept = [event for event in events if not isinstance(event, Started | Milestone)]
    return [msgspec.structs.replace(event, epoch=0, t=0.0) for event in kept]
