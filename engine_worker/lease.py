"""Keeping the worker's lease, in a thread of its own.

The lease says "this worker's engine moves". It is renewed for as long as the step loop gives signs of life within the
time that it announced; a loop that is stuck loses its lease and so its requests, a busy one does not. Time in which
the whole process stood still (a suspended machine) does not count against the loop.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from common.errors import Fenced, LogUnavailable
from common.telemetry.logging import get_logger
from common.telemetry.metrics import WorkerMetrics
from engine_worker.handoff import Progress

log: Final = get_logger(__name__)

_RENEWALS_PER_TTL: Final = 4


class Renewable(Protocol):
    """The part of `common.transport.leases.Lease` that keeps it."""

    worker: str
    ttl_s: float

    def renew(self) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None: ...


class StallWatch:
    """Whether the step loop is stuck. Fed by the lease thread with the time between its own looks."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._seen = progress.latest[0]
        self.stalled_s = 0.0

    def look(self, elapsed_s: float, usual_s: float) -> bool:
        """``elapsed_s`` since the last look, which is ``usual_s`` unless the process itself stood still."""
        count, allowance_s = self._progress.latest
        if count != self._seen:
            self._seen, self.stalled_s = count, 0.0
        else:
            self.stalled_s += min(elapsed_s, 2 * usual_s)
        return self.stalled_s > allowance_s


class LeaseKeeper:
    """Renews until `stop`. ``on_lost`` is called once, on the lease thread, when the name belongs to another
    incarnation or the step loop is stuck: the worker must end then."""

    def __init__(
        self, lease: Renewable, progress: Progress, metrics: WorkerMetrics, on_lost: Callable[[str], None]
    ) -> None:
        self._lease = lease
        self._watch = StallWatch(progress)
        self._metrics = metrics
        self._on_lost = on_lost
        self._interval_s = lease.ttl_s / _RENEWALS_PER_TTL
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def acquire(self, timeout_s: float) -> None:
        """Take the lease and begin to renew it.

        A predecessor of the same name that died keeps it until it runs out, so this tries for ``timeout_s``; then it
        raises `Fenced` (the name is in use) or `LogUnavailable`.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._lease.renew()
                break
            except (Fenced, LogUnavailable) as error:
                if time.monotonic() > deadline:
                    raise
                log.info("waiting for the lease", worker=self._lease.worker, reason=error.message)
                time.sleep(self._interval_s)
        self._thread.start()

    def stop(self, *, release: bool) -> None:
        """Stop renewing; with ``release`` others may take over at once, else when it has run out. Safe to repeat."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout=self._lease.ttl_s)
        if release:
            try:
                self._lease.release()
            except LogUnavailable as error:
                log.warning("lease could not be released, it will run out", reason=error.message)
        self._lease.close()

    def _run(self) -> None:
        last = renewed = time.monotonic()
        pause_s = self._interval_s
        while not self._stopped.wait(pause_s):
            now = time.monotonic()
            if self._watch.look(now - last, self._interval_s):
                self._give_up(f"the step loop has been stuck for {self._watch.stalled_s:.0f} s")
                return
            last = now
            try:
                self._lease.renew()
            except Fenced as error:
                self._give_up(error.message)
                return
            except LogUnavailable as error:
                self._metrics.log_errors.inc()
                if pause_s == self._interval_s:  # once an outage
                    log.warning("lease was not renewed", reason=error.message, age_s=round(now - renewed, 2))
                pause_s = self._interval_s / 4  # so that it is renewed before others have looked twice
                continue
            pause_s = self._interval_s
            self._metrics.lease_renewals.inc()
            self._metrics.lease_remaining.set(max(0.0, self._lease.ttl_s - (now - renewed)))
            renewed = now

    def _give_up(self, reason: str) -> None:
        log.error("lease lost", worker=self._lease.worker, reason=reason)
        if self._watch.stalled_s:
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
        self._on_lost(reason)
