"""A real worker process around the fake runner: ``python -m tests.integration.worker.fake_worker SETTINGS...``.

``FAKE_STEP_S`` slows the steps down; ``FAKE_FAIL_AT`` makes the runner raise at that step;
``FAKE_HANG_AT`` makes it hang there. ``FAKE_LOG_AWAY`` lets each step of the start meet an absent log once.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from common.config import Settings, load
from common.errors import LogUnavailable
from common.events import Grammar
from common.model_card import ModelCard
from common.telemetry.logging import configure_logging
from common.telemetry.metrics import WorkerMetrics
from common.telemetry.settings import TelemetrySettings
from common.telemetry.tracing import Tracing
from common.transport import LogClient, Ownership, RedisSettings, Registry
from engine_worker.config import LeaseSettings, WorkerSettings
from engine_worker.io_loop import IoSettings, Served
from engine_worker.kv_cache.manager import KvCacheManager
from engine_worker.lease import LeaseKeeper
from engine_worker.sequence import Sequence
from engine_worker.step import StepOutput, StepPlan
from engine_worker.worker import Worker
from tests.unit.engine_worker.fake_runner import VOCAB_SIZE, FakeRunner
from tests.unit.engine_worker.text_world import fake_tokenizer, fake_tokenizer_json
from tests.unit.engine_worker.worlds import MAX_MODEL_LEN, World

MODEL = "tiny"
GROUPS: tuple[type[Settings], ...] = (WorkerSettings, LeaseSettings, RedisSettings, TelemetrySettings)
START = ((LogClient, "open"), (LeaseKeeper, "acquire"), (Ownership, "ensure_groups"), (Registry, "register"))


class SlowRunner:
    """The fake runner at the speed of a real one, with its accidents."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner
        self._step_s = float(os.environ.get("FAKE_STEP_S", "0.01"))
        self._fail_at = int(os.environ.get("FAKE_FAIL_AT", "0"))
        self._hang_at = int(os.environ.get("FAKE_HANG_AT", "0"))

    def execute(self, plan: StepPlan) -> StepOutput:
        time.sleep(self._step_s)
        if plan.step == self._fail_at:
            raise RuntimeError("the device fell off the bus")
        if plan.step == self._hang_at:
            time.sleep(3600)
        output = self._runner.execute(plan)
        self._runner.plans.clear()
        return output


@dataclass(frozen=True)
class Preparing:
    kv_cache: KvCacheManager

    def prepare(self, sequence: Sequence) -> None:
        self.kv_cache.prepare(sequence)

    def compile(self, grammar: Grammar) -> None:
        time.sleep(0.05)


def _away_once(owner: Any, name: str) -> None:
    """The first call finds that the log is away for longer than calls are retried."""
    original, failures = getattr(owner, name), [LogUnavailable(f"away at {name}")]

    def away(*arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return original(*arguments)

    setattr(owner, name, away)


def main(argv: list[str]) -> int:
    loaded = load(GROUPS, argv)
    if os.environ.get("FAKE_LOG_AWAY"):
        for owner, name in START:
            _away_once(owner, name)
    configure_logging("worker", loaded[TelemetrySettings])
    world = World(num_blocks=2000, block_size=8, max_num_seqs=16, max_num_batched_tokens=64)
    runner: Any = SlowRunner(world.runner)
    world.engine._runner = runner
    blob = fake_tokenizer_json()
    card = ModelCard(
        name=MODEL,
        served_names=(MODEL,),
        weights_fingerprint="fake",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=(),
        tokenizer_blob=hashlib.sha256(blob).hexdigest(),
        kv_cache_tokens=16_000,
        max_num_seqs=16,
    )
    served = Served(card, {card.tokenizer_blob: blob}, fake_tokenizer(), Preparing(world.kv_cache))
    settings = IoSettings(loaded[RedisSettings], loaded[LeaseSettings], loaded[WorkerSettings])
    metrics = WorkerMetrics(MODEL, registry=CollectorRegistry())
    return Worker(world.engine, served, settings, metrics=metrics, tracing=Tracing.off()).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
