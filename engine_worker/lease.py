"""Keeping the worker's lease, in a thread of its own.

The lease says "this worker's engine moves". It is renewed for as long as the step loop gives signs of life within the
time that it announced. A loop that seems stuck loses its lease, so that others take its requests over at once. If it
goes on after all the lease is taken up again and the takeovers are not held against the requests; if not, the worker
ends. What counts as time is said in `stall_clock`.
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
from engine_worker.stall_clock import StallClock
from engine_worker.stall_watch import StallWatch, Verdict

log: Final = get_logger(__name__)

_RENEWALS_PER_TTL: Final = 4
_LOOKS_PER_RENEWAL: Final = 4


class Renewable(Protocol):
    """The part of `common.transport.leases.Lease` that keeps it."""

    worker: str
    ttl_s: float

    def renew(self) -> None: ...

    def release(self) -> None: ...

    def close(self) -> None: ...


class LeaseKeeper:
    """Renews until `stop`. ``on_lost`` is called once, on the lease thread, when the name belongs to another
    incarnation or the step loop is stuck: the worker must end then."""

    def __init__(
        self,
        lease: Renewable,
        progress: Progress,
        metrics: WorkerMetrics,
        bound_s: float,
        on_lost: Callable[[str], None],
    ) -> None:
        """``bound_s``: longest time without a sign of life, whatever the loop waits for."""
        self.on_stall: Callable[[bool], None] = lambda is_stalled: None
        """Called on the lease thread when the lease is given up because the loop seems stuck, and again, with False,
        when it has gone on and the lease is held again."""
        self._lease = lease
        self._watch = StallWatch(progress, bound_s, StallClock())
        self._metrics = metrics
        self._on_lost = on_lost
        self._interval_s = lease.ttl_s / _RENEWALS_PER_TTL
        self._look_s = self._interval_s / _LOOKS_PER_RENEWAL
        self._renewed = 0.0
        self._renew_at = 0.0
        self._is_stalled = False
        self._is_log_away = False
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
            self._release()
        self._lease.close()

    def _run(self) -> None:
        last = self._renewed = time.monotonic()
        self._renew_at = last + self._interval_s
        while not self._stopped.wait(self._look_s):
            now = time.monotonic()
            verdict = self._watch.look(now - last, self._look_s)
            last = now
            if verdict is Verdict.STUCK:
                self._suspect()
                self._metrics.stalls("stuck").inc()
                self._give_up(f"the step loop has been stuck for {self._watch.stalled_s:.1f} s")
                return
            if verdict is Verdict.SUSPECT:
                self._suspect()
            elif self._is_stalled or now >= self._renew_at:
                try:
                    self._renew(now)
                except Fenced as error:
                    self._give_up(error.message)
                    return

    def _renew(self, now: float) -> None:
        """Raises `Fenced`. A failed one is repeated at the next look, before others have looked twice."""
        try:
            self._lease.renew()
        except LogUnavailable as error:
            self._metrics.log_errors.inc()
            if not self._is_log_away:
                log.warning("lease was not renewed", reason=error.message, age_s=round(now - self._renewed, 2))
            self._is_log_away = True
            return
        self._is_log_away = False
        self._metrics.lease_renewals.inc()
        self._metrics.lease_remaining.set(max(0.0, self._lease.ttl_s - (now - self._renewed)))
        self._renewed, self._renew_at = now, now + self._interval_s
        if self._is_stalled:
            self._is_stalled = False
            self._metrics.stalls("slow").inc()
            log.warning("the step loop goes on: it was slow, not stuck", worker=self._lease.worker)
            self.on_stall(False)

    def _suspect(self) -> None:
        """Let others take over. Nothing is lost by a mistake: what they take is fenced, the rest goes on here."""
        if self._is_stalled:
            return
        self._is_stalled = True
        self._metrics.stalls("suspected").inc()
        log.warning(
            "the step loop seems stuck, the lease is given up",
            worker=self._lease.worker,
            seconds=round(self._watch.stalled_s, 2),
        )
        self.on_stall(True)
        self._release()
        faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)

    def _give_up(self, reason: str) -> None:
        log.error("lease lost", worker=self._lease.worker, reason=reason)
        self._on_lost(reason)

    def _release(self) -> None:
        try:
            self._lease.release()
        except LogUnavailable as error:
            log.warning("lease could not be released, it will run out", reason=error.message)
