"""Which log `inspect`, `replay` and `tail` read: the one they are given, that of a `headrace serve` that runs here, or,
when none does, the one that it left behind, for which its embedded server is started as long as it is read. `tail`,
which has no end, reads no such log: it would keep a serve from being started."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

from cli.groups import LocalLogSettings
from common.config import Loaded
from common.errors import ConfigError, LogUnavailable
from common.transport import EmbeddedServer, EmbeddedSettings, LogClient, RedisSettings
from common.transport.embedded import try_lock

SERVE_FILE: Final = "serve.json"
_AOF: Final = "appendonlydir"  # in the directory of a server that has run
_POLL_S: Final = 0.05
_PATIENCE_S: Final = 5.0


class StateDirInUse(ConfigError):
    """Another process holds the state directory."""


@contextmanager
def locked(state_dir: Path, *, patience_s: float = 0.0) -> Iterator[Path]:
    """The state directory, created and held by this process alone: who holds it may run its log.

    Raises `StateDirInUse` when another process still holds it after ``patience_s``, `ConfigError` when it cannot be
    used.
    """
    path = state_dir.expanduser().absolute()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = (path / "lock").open("a+", encoding="ascii")
    except OSError as error:
        raise ConfigError(f"state_dir: cannot be used: {error.strerror}, got {str(path)!r} (--state-dir)") from error
    with lock:
        give_up_at = time.monotonic() + patience_s
        while not try_lock(lock.fileno()):
            if time.monotonic() >= give_up_at:
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
                raise StateDirInUse(
                    f"state_dir: {path} is in use by another headrace (pid {holder}); stop it or give --state-dir"
                )
            time.sleep(_POLL_S)
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield path


def embedded_settings(loaded: Loaded, state_dir: Path) -> EmbeddedSettings:
    """Of the server of a state directory: its log is there unless ``data_dir`` says otherwise."""
    settings = loaded[EmbeddedSettings]
    if "data_dir" in loaded.sources:
        return settings
    return settings.model_copy(update={"data_dir": state_dir / "log"})


@asynccontextmanager
async def opened_log(loaded: Loaded, *, starts: bool = True) -> AsyncIterator[LogClient]:
    """The log as given, else the embedded one of the state directory, else the default; closed, and stopped if it was
    started for this, at the end. To be called on the main thread. Without ``starts`` an embedded one must be running.

    Raises `LogUnavailable`, and `ConfigError` when the embedded server cannot be started.
    """
    with ExitStack() as server:
        url = "" if "redis_url" in loaded.sources else _local_url(loaded, server, starts=starts)
        settings = loaded[RedisSettings]
        client = await _open(loaded, settings.model_copy(update={"redis_url": url}) if url else settings)
        try:
            yield client
        finally:
            await client.close()


async def _open(loaded: Loaded, settings: RedisSettings) -> LogClient:
    if settings is not loaded[RedisSettings] or "redis_url" in loaded.sources:
        return await LogClient.open(settings)
    try:
        with _quiet():
            return await LogClient.open(settings)
    except LogUnavailable as error:
        place = loaded[LocalLogSettings].state_dir.absolute()
        raise LogUnavailable(
            f"no headrace serve has its log in {place} and no --redis-url was given; --state-dir names another place"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Nobody has asked for the default address: that nothing answers there is no news."""
    transport = logging.getLogger(LogClient.__module__)
    level = transport.level
    transport.setLevel(logging.ERROR)
    try:
        yield
    finally:
        transport.setLevel(level)


def _local_url(loaded: Loaded, stack: ExitStack, *, starts: bool) -> str:
    """URL of the log of the state directory, which ``stack`` stops again if nobody else runs it; empty for none."""
    state_dir = loaded[LocalLogSettings].state_dir.expanduser().absolute()
    settings = embedded_settings(loaded, state_dir)
    try:
        if not (settings.data_dir / _AOF).is_dir():
            return _announced_url(state_dir)
    except PermissionError:
        return _announced_url(state_dir)
    give_up_at = time.monotonic() + _PATIENCE_S
    while True:
        try:  # from here on a serve that is started waits until we are done
            stack.enter_context(locked(state_dir))
            break
        except StateDirInUse:
            url = _announced_url(state_dir)
            if url or time.monotonic() >= give_up_at:  # else another of our kind reads
                return url
            time.sleep(_POLL_S)
    if not starts:
        raise LogUnavailable(
            f"no headrace serve runs in {state_dir}, so nothing happens there; headrace inspect tells what has "
            "happened to a request, --state-dir names another place, --redis-url another log"
        )
    server = EmbeddedServer.start(settings)
    stack.callback(server.stop)
    return server.url


def _announced_url(state_dir: Path) -> str:
    """What the ``headrace serve`` that holds ``state_dir`` says of its embedded log."""
    try:
        facts = json.loads((state_dir / SERVE_FILE).read_text(encoding="utf-8"))
        url = str(facts.get("log", ""))
        return url if url and Path(url.removeprefix("unix://")).is_socket() else ""
    except (OSError, ValueError, AttributeError):
        return ""
