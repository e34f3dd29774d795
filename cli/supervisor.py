"""Child processes of ``headrace serve``: started, watched, restarted, stopped in order.

One thread, no callbacks: `Supervisor.check` looks at the children whenever it is called and does what is due. Children
stand in process groups of their own, so that a Ctrl-C in the terminal reaches only the parent, which stops them in
order; the kernel kills them when the parent dies without having done so.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from common import last_words
from common.errors import HeadraceError

FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 30.0
HEALTHY_S: Final = 60.0  # a child that lived so long starts anew with the first backoff
MAX_START_FAILURES: Final = 3
EXIT_CONFIG: Final = 2
_PR_SET_PDEATHSIG: Final = 1


class ChildFailed(HeadraceError):
    """A child cannot be started."""

    code = "child_failed"


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """``role`` groups children that are stopped together; ``argv`` follows the Python interpreter."""

    name: str
    role: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]


class _Child:
    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self.due_at = 0.0
        self.backoff_s = FIRST_BACKOFF_S
        self.failures = 0

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Owned by the main thread. ``run_dir`` gets one ``NAME.pid`` a child; ``say`` takes lines for the user."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        run_dir: Path,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._children = [_Child(spec) for spec in specs]
        self._run_dir = run_dir
        self._say = say
        self._clock = clock
        self._all_ready = False
        run_dir.mkdir(parents=True, exist_ok=True)

    def all_ready(self) -> None:
        """From now on a child that dies is restarted however often: it has worked once."""
        self._all_ready = True
        for child in self._children:
            child.failures = 0

    def pids(self) -> dict[str, int]:
        return {child.spec.name: child.process.pid for child in self._children if child.process and child.is_alive}

    def check(self) -> None:
        """Start what is due and take note of what died.

        Raises `ChildFailed` when a child refused its settings, or died too often before everything was ready.
        """
        for child in self._children:
            if child.is_alive:
                continue
            if child.process is not None:
                self._bury(child, child.process)
            if self._clock() >= child.due_at:
                self._start(child)

    def kill(self, name: str, why: str) -> None:
        """End a child that is of no use any more; `check` starts it again. Of an unknown or dead one it is a no-op."""
        for child in self._children:
            if child.spec.name == name and child.process is not None and child.is_alive:
                self._say(f"{name} {why}, killed")
                child.process.kill()
                child.process.wait()

    def stop(self, role: str, timeout_s: float, is_forced: Callable[[], bool]) -> None:
        """SIGTERM to all children of ``role``; SIGKILL to those that still live after ``timeout_s``, or at once when
        ``is_forced`` turns true. Returns when they are gone."""
        alive = [child for child in self._children if child.spec.role == role and child.is_alive]
        self._signal(alive, signal.SIGTERM)
        deadline = self._clock() + timeout_s
        while any(child.is_alive for child in alive):
            if is_forced() or self._clock() > deadline:
                for child in alive:
                    if child.is_alive and not is_forced():
                        self._say(f"{child.spec.name} did not stop within {timeout_s:g} s, killed")
                self._signal(alive, signal.SIGKILL)
                for child in alive:
                    if child.process is not None:
                        child.process.wait()
            time.sleep(0.02)
        for child in alive:
            self._pid_file(child).unlink(missing_ok=True)
            self._words_file(child).unlink(missing_ok=True)

    def _start(self, child: _Child) -> None:
        parent = os.getpid()
        child.process = subprocess.Popen(
            [sys.executable, *child.spec.argv],
            env={**child.spec.environ, last_words.FILE_VARIABLE: str(self._words_file(child))},
            stdin=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=lambda: die_with(parent),
        )
        child.started_at = self._clock()
        try:
            self._pid_file(child).write_text(f"{child.process.pid}\n", encoding="ascii")
        except OSError as error:  # a full disk is no reason to stop the others
            self._say(f"{child.spec.name} runs without a pid file: {error.strerror}")

    def _bury(self, child: _Child, process: subprocess.Popen[bytes]) -> None:
        how, words = _how(process.returncode), last_words.read(self._words_file(child))
        child.process = None
        child.failures += 1
        name = child.spec.name
        self._pid_file(child).unlink(missing_ok=True)
        if not self._all_ready and (process.returncode == EXIT_CONFIG or child.failures >= MAX_START_FAILURES):
            raise ChildFailed(f"{name} could not be started: {words or f'{how}; its own message is above'}")
        if self._clock() - child.started_at > HEALTHY_S:
            child.backoff_s = FIRST_BACKOFF_S
        what = "has ended" if process.returncode == 0 else "died"
        self._say(f"{name} {what} ({words or how}), restarting in {child.backoff_s:g} s")
        child.due_at = self._clock() + child.backoff_s
        child.backoff_s = min(2 * child.backoff_s, MAX_BACKOFF_S)

    def _pid_file(self, child: _Child) -> Path:
        return self._run_dir / f"{child.spec.name}.pid"

    def _words_file(self, child: _Child) -> Path:
        return self._run_dir / f"{child.spec.name}.reason"

    def _signal(self, children: Sequence[_Child], number: signal.Signals) -> None:
        for child in children:
            if child.process is not None and child.is_alive:
                child.process.send_signal(number)


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def die_with(parent: int) -> None:
    """Runs in the child before its program: the kernel shall kill it when the parent dies. Linux only; elsewhere a
    parent killed with SIGKILL leaves its children running."""
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


_libc: Final = ctypes.CDLL(None) if sys.platform == "linux" else None
