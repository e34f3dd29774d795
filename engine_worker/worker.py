"""One worker process: the model and the engine on the main thread, everything that talks to the log beside it.

::

    main thread      StepLoop: commands -> Engine.step -> reports        (no I/O)
    thread "io"      event loop: claim, resume, detokenise, append       (see `io_loop`)
    thread "lease"   renews the lease while the step loop moves          (see `lease`)

SIGTERM and SIGINT drain; a second one ends the process at once. SIGUSR1 hands everything over to other workers, before
or in the middle of a drain. An exception in the step loop gives the lease up
before anything else, so that other workers continue the requests, and ends the process with a failure.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable
from typing import Final

from common import last_words
from common.telemetry.logging import get_logger
from common.telemetry.metrics import WorkerMetrics
from common.telemetry.tracing import Tracing
from engine_worker.config import WorkerSettings
from engine_worker.engine import Engine
from engine_worker.handoff import Commands, StepReports
from engine_worker.io_loop import IoLoop, IoSettings, Served
from engine_worker.reporting import Reporting
from engine_worker.step_limits import StepLimits
from engine_worker.step_loop import StepLoop

log: Final = get_logger(__name__)

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
_ABANDON_TIMEOUT_S: Final = 5.0
_STOP: Final = (signal.SIGTERM, signal.SIGINT)


class Worker:
    """Joins the parts and runs until it is told to stop, or cannot go on."""

    def __init__(
        self,
        engine: Engine,
        served: Served,
        settings: IoSettings,
        *,
        metrics: WorkerMetrics,
        tracing: Tracing,
        end_process: Callable[[int], object] = os._exit,
    ) -> None:
        """``end_process`` ends the process without another word."""
        self.name = worker_name(settings.worker)
        self._end_process = end_process
        self._signals = 0
        self._hands_over = False
        self._step_loop = StepLoop(
            engine,
            Commands(),
            StepReports(settings.worker.max_output_backlog_steps, settings.worker.stream_interval),
            StepLimits(settings.lease.lease_ttl_s, settings.lease.step_bound_s, settings.lease.step_slack),
            settings.lease.step_bound_s,
        )
        self._io = IoLoop(
            self.name,
            settings,
            served,
            self._step_loop,
            reporting=Reporting(metrics, tracing, self.name),
            metrics=metrics,
            on_lease_lost=self._lease_lost,
        )

    def not_ready(self) -> str | None:
        """Why this worker takes no work now, or None when it does."""
        return self._io.not_ready

    def stop(self, *, handover: bool = False) -> None:
        """Ask the worker to drain; `run` then returns. From any thread."""
        self._io.ask_to_stop(handover=handover)

    def run(self) -> int:
        """Work until stopped; the process's exit code. Call it on the main thread."""
        self._watch_signals()
        self._io.start()
        try:
            self._step_loop.run()
        except Exception:
            log.exception("the engine failed", worker=self.name, requests=self._io.request_ids())
            self._io.abandon()
            self._io.join(_ABANDON_TIMEOUT_S)
            return EXIT_FAILED
        self._io.engine_halted()
        self._io.join()
        _ignore_handover()
        if self._io.failure is not None:
            return EXIT_FAILED
        if self._hands_over:
            last_words.leave("its requests are handed over")
        return EXIT_OK

    def _lease_lost(self, reason: str) -> None:
        """The requests belong to others now, and the main thread may hang: there is nothing to tidy up."""
        log.error("worker ends", worker=self.name, reason=reason)
        self._end_process(EXIT_FAILED)

    def _watch_signals(self) -> None:
        """Signals are read on the I/O loop, so that they are heard during a long step, too."""
        if threading.current_thread() is not threading.main_thread():
            return
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for number in (*_STOP, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)
        self._signal_sockets = (reader, writer)
        self._io.on_readable(reader.fileno(), self._hear_signals)

    def _hear_signals(self) -> None:
        for number in self._signal_sockets[0].recv(64):
            if number not in (*_STOP, signal.SIGUSR1):
                continue
            log.info("signal", worker=self.name, signal=signal.Signals(number).name)
            self._signals += number in _STOP
            if self._signals > 1:
                self._end_process(EXIT_FAILED)
            self._hands_over = self._hands_over or number == signal.SIGUSR1
            self._io.ask_to_stop(handover=number == signal.SIGUSR1)


def _ignore_handover() -> None:
    """Everything is handed over, and the interpreter gives signals their default effect, death, before it is gone."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def worker_name(settings: WorkerSettings) -> str:
    """As set, or one that no other live worker has."""
    if settings.worker_name:
        return settings.worker_name
    host = "".join(c if c.isalnum() or c in "._-" else "-" for c in socket.gethostname())[:64]
    return f"{host}-{os.getpid()}-{secrets.token_hex(3)}"
