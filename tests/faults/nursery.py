"""A process that has imported everything and forks edges and workers: a restart is a tenth of a second instead of two.

What it forks runs the same command as one that an operator starts, with its own environment, output and signals; only
the time for importing is saved, so that a run can have a fault every two seconds on two cores. Everything forked dies
with the nursery, and the nursery with its parent.

Protocol over pipes, a JSON document a line: ``{"words", "environ", "log"}`` in; ``{"pid"}`` out, in order, and
``{"ended", "code"}`` whenever one has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

from cli.main import main

ROOT: Final = Path(__file__).parents[2]
_PR_SET_PDEATHSIG: Final = 1
_FORK_S: Final = 60.0


class Child:
    """One forked process; the part of `subprocess.Popen` that `deployment.Process` needs."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self._nursery = nursery

    def poll(self) -> int | None:
        return self._nursery.codes.get(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        return self._nursery.wait(self.pid, timeout)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """Starts the process; `fork` from any thread; `close` ends everything that it forked."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self._pids: list[int] = []
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._listener = threading.Thread(target=self._listen, name="nursery", daemon=True)
        self._listener.start()
        self._forking = threading.Lock()

    def fork(self, words: list[str], environ: dict[str, str], log: Path) -> Child:
        """Run ``headrace WORDS`` with its output in ``log``."""
        assert self._process.stdin is not None
        with self._forking:
            self._process.stdin.write(
                json.dumps({"words": words, "environ": environ, "log": str(log)}).encode() + b"\n"
            )
            self._process.stdin.flush()
            with self._changed:
                assert self._changed.wait_for(lambda: self._pids, _FORK_S), "the nursery does not answer"
                return Child(self, self._pids.pop())

    def wait(self, pid: int, timeout: float | None) -> int:
        with self._changed:
            if not self._changed.wait_for(lambda: pid in self.codes, timeout):
                raise subprocess.TimeoutExpired(f"process {pid}", timeout or 0)
            return self.codes[pid]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._listener.join()
        self._process.stdin.close()
        self._process.stdout.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            with self._changed:
                if "pid" in said:
                    self._pids.append(said["pid"])
                else:
                    self.codes[said["ended"]] = said["code"]
                self._changed.notify_all()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _grow_up(order: dict[str, Any]) -> None:
    """In the child: become the command."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _die_with_parent()
    output = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.closerange(3, 256)
    os.environ.clear()
    os.environ.update(order["environ"])
    os._exit(_exit_code(order["words"]))


def _exit_code(words: list[str]) -> int:
    try:
        return int(main(words))
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _say(words: dict[str, int]) -> None:
    os.write(1, json.dumps(words).encode() + b"\n")


def serve() -> None:
    """Fork what is asked for until standard input ends."""
    _die_with_parent()
    for module in ("cli.edge", "cli.worker", "edge.__main__", "engine_worker.__main__"):
        importlib.import_module(module)
    gc.freeze()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pending = b""
    while True:
        ready, _, _ = select.select([0, reader], [], [])
        if reader in ready:
            os.read(reader, 4096)
            _reap()
        if 0 in ready:
            piece = os.read(0, 1 << 16)
            if not piece:
                return
            *orders, pending = (pending + piece).split(b"\n")
            for order in orders:
                pid = os.fork()
                if not pid:
                    _grow_up(json.loads(order))
                _say({"pid": pid})


if __name__ == "__main__":
    serve()
