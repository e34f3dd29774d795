"""The I/O thread: one event loop that joins lease, intake, output stage and registration.

Order at start: connect, take the lease, create the groups, register the model, then claim. Order at the end: stop
claiming, finish (or not) what runs, halt the engine, write what it said last, hand the rest over, give up the lease.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

from common import last_words
from common.errors import ConfigError, Fenced, LogUnavailable
from common.model_card import ModelCard
from common.telemetry.logging import get_logger
from common.telemetry.metrics import WorkerMetrics
from common.tokenization.tokenizer import Tokenizer
from common.transport.absence import LOOKS_PER_TTL
from common.transport.client import LogClient, RedisSettings
from common.transport.ownership import Ownership
from common.transport.registry import Registry
from engine_worker.config import LeaseSettings, WorkerSettings
from engine_worker.handoff import Halt
from engine_worker.intake import Intake, Preparing, Room
from engine_worker.lease import LeaseKeeper
from engine_worker.output_stage import OutputStage
from engine_worker.reporting import Reporting
from engine_worker.resume import Resumer
from engine_worker.step_loop import StepLoop
from engine_worker.wakeup import LoopWaker

_T = TypeVar("_T")

log: Final = get_logger(__name__)

_CONNECT_PAUSE_S: Final = 1.0
_REGISTER_AGAIN_S: Final = 30.0
_DRAIN_POLL_S: Final = 0.02
_LAST_CLAIM_S: Final = 2.0
_URGENT_SEATS: Final = 4
_STALLED: Final = "the engine seems stuck"


@dataclass(frozen=True, slots=True)
class IoSettings:
    """The groups that the I/O side reads."""

    redis: RedisSettings
    lease: LeaseSettings
    worker: WorkerSettings


@dataclass(frozen=True, slots=True)
class Served:
    """What the worker serves, as far as the I/O side needs to know."""

    card: ModelCard
    blobs: Mapping[str, bytes]
    tokenizer: Tokenizer
    preparing: Preparing


@dataclass(frozen=True, slots=True)
class _Parts:
    ownership: Ownership
    registry: Registry
    output: OutputStage
    intake: Intake


class IoLoop:
    """Runs in a thread of its own between `start` and `join`. Methods are thread safe."""

    def __init__(
        self,
        name: str,
        settings: IoSettings,
        served: Served,
        step_loop: StepLoop,
        *,
        reporting: Reporting,
        metrics: WorkerMetrics,
        on_lease_lost: Callable[[str], None],
    ) -> None:
        self.name = name
        self.failure: BaseException | None = None
        self.not_ready: str | None = "starting"
        """Why no work is taken now; None while it is."""
        self._settings = settings
        self._served = served
        self._step_loop = step_loop
        self._reporting = reporting
        self._metrics = metrics
        self._on_lease_lost = on_lease_lost
        self._keeper: LeaseKeeper | None = None
        self._output: OutputStage | None = None
        self._loop = asyncio.new_event_loop()
        self._stop_asked = asyncio.Event()
        self._engine_halted = asyncio.Event()
        self._at_risk: dict[str, int] = {}  # what others may have taken over while the step loop seemed stuck
        self._forgiving: asyncio.Task[None] | None = None
        self._handover = settings.worker.handover
        self._next_seq_id = iter(range(1, 1 << 62)).__next__
        self._thread = threading.Thread(target=self._run, name="io", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask_to_stop(self, *, handover: bool = False) -> None:
        """Drain, and end. With ``handover`` (or the setting) running requests are given to others at once."""
        self._soon(self._begin_stop, handover)

    def engine_halted(self) -> None:
        """The step loop has returned: nothing more will be reported."""
        self._soon(self._engine_halted.set)

    def abandon(self) -> None:
        """The engine has died: give the lease up at once so that others take over, and end."""
        if self._keeper is not None:
            self._keeper.stop(release=True)
        self._soon(self._cancel_everything)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread; False when it has not ended in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def on_readable(self, fd: int, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the I/O loop whenever ``fd`` can be read."""
        self._loop.add_reader(fd, callback)

    def request_ids(self) -> list[str]:
        """The requests that this worker owns now."""
        return [] if self._output is None else sorted(self._output.live)

    def _soon(self, callback: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody is interested any more
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _stalled(self, ownership: Ownership, is_stalled: bool) -> None:
        """The lease was given up because the step loop seemed stuck; or it is held again since it was only slow."""
        if is_stalled:
            self._at_risk = ownership.held
            self.not_ready = self.not_ready or _STALLED
            return
        if self.not_ready == _STALLED:
            self.not_ready = None
        self._forgiving = asyncio.create_task(_unless_log_is_away(ownership.forgive(self._at_risk)), name="forgive")

    def _begin_stop(self, handover: bool) -> None:
        self._handover = self._handover or handover
        self._stop_asked.set()
        if self._output is None:  # it waits for the log, and has nothing to finish
            self._cancel_everything()

    def _cancel_everything(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        except asyncio.CancelledError:
            log.info("I/O abandoned", worker=self.name)
        except (ConfigError, Fenced) as error:  # another worker has the name, or serves other weights
            self.failure = error
            last_words.leave(error.message)
            log.error("cannot serve", worker=self.name, reason=error.message)
        except BaseException as error:  # the thread's outermost frame: the worker ends with this failure
            self.failure = error
            log.exception("I/O failed", worker=self.name)
        finally:
            self.not_ready = "stopped"
            if self._keeper is not None:
                self._keeper.stop(release=True)
            self._step_loop.commands.put(Halt())
            self._loop.close()

    async def _main(self) -> None:
        client = await _patiently(lambda: LogClient.open(self._settings.redis))
        try:
            await self._serve(client)
        finally:
            await client.close()

    async def _serve(self, client: LogClient) -> None:
        lease = client.lease(self.name, self._settings.lease.lease_ttl_s)
        bound_s = self._settings.lease.step_bound_s
        keeper = LeaseKeeper(lease, self._step_loop.progress, self._metrics, bound_s, self._on_lease_lost)
        await _patiently(lambda: self._take(keeper, 2 * lease.ttl_s + 5))
        self._keeper = keeper
        card = self._served.card
        ownership = Ownership(client, model=card.name, lease=lease, max_attempts=self._settings.worker.max_takeovers)
        keeper.on_stall = lambda is_stalled: self._soon(self._stalled, ownership, is_stalled)
        await _patiently(ownership.ensure_groups)
        registry = Registry(client)
        await _patiently(lambda: registry.register(self.name, card, self._served.blobs))
        output = self._output = OutputStage(
            ownership, self._step_loop.commands, self._step_loop.reports, self._reporting
        )
        waker = LoopWaker(self._loop, output.wake)
        self._step_loop.reports.on_report(waker.wake)
        parts = _Parts(ownership, registry, output, self._make_intake(ownership, output))
        try:
            await self._run_tasks(parts)
        finally:
            waker.close()

    async def _take(self, keeper: LeaseKeeper, timeout_s: float) -> None:
        try:
            await asyncio.to_thread(keeper.acquire, timeout_s)
        except Fenced as error:
            raise Fenced(
                f"worker_name: a live worker has the name {self.name!r} already; give this one another "
                "(--worker-name), or none to draw one"
            ) from error

    def _make_intake(self, ownership: Ownership, output: OutputStage) -> Intake:
        card, served = self._served.card, self._served
        intake = Intake(
            ownership,
            output,
            self._step_loop.commands,
            Resumer(served.tokenizer, self.name, card.max_model_len, self._next_seq_id, card.weights_fingerprint),
            served.preparing,
            room=Room(free=lambda: _room(card, output), urgent=lambda: _urgent_room(card, output)),
            reporting=self._reporting,
        )
        intake.on_drain = self._begin_stop
        return intake

    async def _run_tasks(self, parts: _Parts) -> None:
        intake = parts.intake
        writer = asyncio.create_task(parts.output.run(), name="write")
        claims = asyncio.create_task(intake.claim_forever(), name="claim")
        takeovers = asyncio.create_task(
            intake.take_over_forever(self._settings.lease.lease_ttl_s / LOOKS_PER_TTL), name="take over"
        )
        stop = asyncio.create_task(self._stop_asked.wait(), name="stop")
        rest = {
            asyncio.create_task(intake.read_inbox_forever(), name="inbox"),
            asyncio.create_task(intake.enforce_deadlines_forever(), name="deadlines"),
            asyncio.create_task(intake.let_in_forever(), name="let in"),
            asyncio.create_task(self._report_forever(parts), name="report"),
        }
        every = {writer, claims, takeovers, stop, *rest}
        self.not_ready = None
        log.info("ready", worker=self.name, model=self._served.card.name)
        try:
            done, _ = await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stop}:
                task.result()  # none of them ends by itself: raises its failure
            await self._stop_taking(parts, claims, takeovers)
            await self._finish_running(parts, writer)
        finally:
            for task in every:
                task.cancel()
            await asyncio.gather(*every, return_exceptions=True)

    async def _stop_taking(self, parts: _Parts, claims: asyncio.Task[None], takeovers: asyncio.Task[None]) -> None:
        self.not_ready = "draining"
        self._reporting.draining()
        parts.intake.is_open = False
        log.info("draining", worker=self.name, requests=len(parts.output.live), handover=self._handover)
        await _unless_log_is_away(parts.registry.unregister(self.name))
        takeovers.cancel()
        await asyncio.wait({claims}, timeout=_LAST_CLAIM_S)  # it ends with the claim under way, which is ours then
        claims.cancel()

    async def _finish_running(self, parts: _Parts, writer: asyncio.Task[None]) -> None:
        """Let requests end within their time, then halt the engine and hand the rest over."""
        output, intake = parts.output, parts.intake
        deadline = time.monotonic() + self._settings.worker.worker_drain_timeout_s
        while (output.live or intake.num_starting) and time.monotonic() < deadline and not self._handover:
            if writer.done():
                writer.result()
            await asyncio.sleep(_DRAIN_POLL_S)
        self._step_loop.commands.put(Halt())
        await self._engine_halted.wait()
        output.stop()
        await _unless_log_is_away(writer)
        await _unless_log_is_away(output.hand_over())
        for request_id in intake.drop_starting():
            await _unless_log_is_away(parts.ownership.release(request_id))
        log.info("drained", worker=self.name)

    async def _report_forever(self, parts: _Parts) -> None:
        """Metrics, and the figures that edges show; the registration again, in case the server lost it."""
        registered = time.monotonic()
        while True:
            await asyncio.sleep(self._settings.worker.stats_interval_s)
            stats = self._step_loop.stats
            self._reporting.engine(stats, len(self._step_loop.reports))
            if self._stop_asked.is_set():
                continue
            figures = {name: float(value) for name, value in dataclasses.asdict(stats).items()}
            figures |= {
                "requests": float(len(parts.output.live)),
                "max_num_seqs": float(self._served.card.max_num_seqs),
            }
            await _unless_log_is_away(parts.registry.report(self.name, figures))
            if time.monotonic() - registered > _REGISTER_AGAIN_S:
                registered = time.monotonic()
                await _unless_log_is_away(parts.registry.register(self.name, self._served.card, self._served.blobs))


def _room(card: ModelCard, output: OutputStage) -> int:
    """Sequences that the engine could begin: seats, as long as the cache holds what already sits."""
    if output.num_sequences and output.num_tokens >= card.kv_cache_tokens:
        return 0
    return max(0, card.max_num_seqs - output.num_sequences)


def _urgent_room(card: ModelCard, output: OutputStage) -> int:
    """Requests of the highest priority class that a full engine takes beyond its seats: the scheduler preempts others
    for them. A few at a time, since other workers may have seats, and no more than there are others to give way."""
    beyond = max(0, output.num_sequences - card.max_num_seqs)
    return max(0, min(_URGENT_SEATS, output.num_yielding) - beyond)


async def _patiently(step: Callable[[], Awaitable[_T]]) -> _T:
    """A step of the start, which may be repeated: a worker has loaded its model for nothing when it ends because the
    log is away for longer than a call is retried."""
    told = ""
    while True:
        try:
            return await step()
        except LogUnavailable as error:
            if error.message != told:
                log.warning("waiting for the log", reason=error.message)
            told = error.message
            await asyncio.sleep(_CONNECT_PAUSE_S)


async def _unless_log_is_away(work: Awaitable[object]) -> None:
    try:
        await work
    except LogUnavailable as error:
        log.warning("the log cannot be reached", reason=error.message)
