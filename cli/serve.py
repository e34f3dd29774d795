"""``headrace serve``: a log, workers and edges on one machine, as child processes of this one.

Order of side effects, and of their undoing at the end: lock the state directory; check the port; import the demo model
where it is missing; start the embedded server (unless ``--redis-url`` names one); start workers and edges together;
wait until an edge is ready and lists the model; say so. A stop drains edges (their streams need the workers), then
workers (their last events need the log), then the server. A second Ctrl-C kills.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cli import groups
from cli.groups import ServeSettings
from cli.local_log import SERVE_FILE, embedded_settings, locked
from cli.model_import import ensure_demo_model
from cli.pulse import Pulse
from cli.supervisor import ChildSpec, Supervisor
from common.config import Loaded, load
from common.errors import ConfigError, HeadraceError
from common.telemetry.logging import configure_logging
from common.telemetry.settings import TelemetrySettings
from common.transport.client import LogClient, RedisSettings
from common.transport.embedded import EmbeddedServer
from edge.auth import accepted_keys
from edge.config import ApiSettings, HttpSettings, StreamSettings
from engine_worker.config import ComputeSettings, KvCacheSettings, ModelSettings, WorkerSettings

DESCRIPTION: Final = "Serve a model on this machine: a log, workers and edges as child processes of this one."
DEMO: Final = "demo"
_POLL_S: Final = 0.1
_PROGRESS_S: Final = 5.0
_READER_S: Final = 5.0  # inspect and replay hold the state directory while they read the log of a serve that has ended
_LOCAL: Final = "127.0.0.1"
_MODEL_LABEL: Final = re.compile(r'^vllm:num_requests_running\{.*?model_name="([^"]+)"', re.MULTILINE)


class StartFailed(HeadraceError):
    """The system did not become ready."""

    code = "start_failed"


@dataclass(frozen=True, slots=True)
class Plan:
    """What will run, decided before anything is started."""

    specs: tuple[ChildSpec, ...]
    urls: tuple[str, ...]  # one an edge
    worker_urls: Mapping[str, str]  # each worker's metrics listener, by the worker's name
    key: str  # one that the edges accept; empty = none needed


class Stop:
    """Counts SIGINT and SIGTERM: the first asks for an orderly stop, the second for an immediate one."""

    def __init__(self) -> None:
        self.count = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._count)

    @property
    def asked(self) -> bool:
        return self.count > 0

    @property
    def forced(self) -> bool:
        return self.count > 1

    def _count(self, *_: object) -> None:
        self.count += 1


def main(argv: Sequence[str], prog: str) -> int:
    """Serve until stopped. Raises `ConfigError`, `ChildFailed`, `StartFailed` or `LogUnavailable` before that."""
    loaded = load(groups.SERVE, argv, prog=prog, description=DESCRIPTION, defaults={"model": DEMO})
    settings = loaded[ServeSettings]
    configure_logging("serve", loaded[TelemetrySettings].model_copy(update={"log_level": "error"}))  # `say` tells it
    stop = Stop()
    with locked(settings.state_dir, patience_s=_READER_S) as state_dir, no_announcement(state_dir):
        ports = edge_ports(loaded[HttpSettings], settings.edges)
        model = loaded[ModelSettings].model
        model_path = str(ensure_demo_model(state_dir / "models", say)) if model == DEMO else model
        log = Log(loaded, state_dir)
        try:
            plan = plan_children(loaded, log.url, model_path, ports)
            supervisor = Supervisor(plan.specs, state_dir / "run", say)
            name, pulse = "", Pulse(plan.worker_urls)
            try:
                name = wait_until_ready(supervisor, plan, settings.start_timeout_s, stop)
                if name:
                    announcement = Announcement(state_dir / SERVE_FILE, plan, name, log.embedded_url)
                    announcement.write(supervisor.pids())
                    print(invitation(plan, name), flush=True)
                    pulse.start()
                    watch(supervisor, pulse, log, announcement, stop)
            finally:
                pulse.stop()
                # Nobody was told of an address before it was ready: nothing is there to be drained.
                shut_down(supervisor, loaded, lambda: stop.forced or not name)
        finally:
            log.stop()
    return 0


def watch(supervisor: Supervisor, pulse: Pulse, log: Log, announcement: Announcement, stop: Stop) -> None:
    """Replace what dies or hangs until a stop is asked for."""
    while not stop.asked:
        supervisor.check()
        for silent in pulse.take_silent(supervisor.pids()):
            supervisor.kill(silent, "has not answered for a minute")
        log.check()
        announcement.update(supervisor.pids())
        time.sleep(_POLL_S)


@contextmanager
def no_announcement(state_dir: Path) -> Iterator[None]:
    """``serve.json`` is there only while what it tells is true; a serve that was killed has left it behind."""
    (state_dir / SERVE_FILE).unlink(missing_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (state_dir / SERVE_FILE).unlink()


def edge_ports(http: HttpSettings, count: int) -> list[int]:
    """A free port for each edge: the one asked for and those above it, or any for 0. Raises `ConfigError`."""
    if http.port == 0:
        return [free_port(http.host) for _ in range(count)]
    ports = list(range(http.port, http.port + count))
    for port in ports:
        try:
            _bind(http.host, port)
        except OSError as error:
            raise ConfigError(
                f"port: {http.host}:{port} cannot be listened on: {error.strerror}; stop what uses it or give --port"
            ) from error
    return ports


def free_port(host: str) -> int:
    """One below the ports that systems give to outgoing connections: none of these takes it before the child does."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            return _bind(host, secrets.randbelow(10_000) + 20_000)
    return _bind(host, 0)


def _bind(host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        bound: int = probe.getsockname()[1]
        return bound


class Log:
    """The log: the server that ``--redis-url`` names, or an embedded one, started here and started again if it dies."""

    def __init__(self, loaded: Loaded, state_dir: Path) -> None:
        self._server: EmbeddedServer | None = None
        self.url = loaded[RedisSettings].redis_url
        self.embedded_url = ""  # written down for `inspect`; one that was given may hold a password
        if "redis_url" in loaded.sources:
            asyncio.run(_reach(loaded[RedisSettings]))
            return
        settings = self._settings = embedded_settings(loaded, state_dir)
        self._server = EmbeddedServer.start(settings)
        self.url = self.embedded_url = self._server.url
        say(f"log: embedded server in {settings.data_dir}")

    def check(self) -> None:
        if self._server is not None and not self._server.is_alive:
            say("the embedded server died, restarting it")
            self._server = EmbeddedServer.start(self._settings)

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


async def _reach(settings: RedisSettings) -> None:
    """Raises `LogUnavailable` or `ConfigError` once, here, rather than in the log of every child."""
    client = await LogClient.open(settings.model_copy(update={"redis_retry_s": 0.0}))
    await client.close()


def plan_children(loaded: Loaded, redis_url: str, model: str, ports: Sequence[int]) -> Plan:
    settings = loaded[ServeSettings]
    # Children read nothing but their variables: whatever flags and files said is settled here.
    own = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    own |= {"HEADRACE_REDIS_URL": redis_url, "PYTHONUNBUFFERED": "1"}
    metrics_ports = [free_port(_LOCAL) for _ in range(settings.workers)]
    specs = [
        ChildSpec(f"worker-{i + 1}", "worker", ("-m", "engine_worker"), _worker_environ(loaded, model, i, port) | own)
        for i, port in enumerate(metrics_ports)
    ]
    pages = json.dumps([f"http://{_LOCAL}:{port}/metrics" for port in metrics_ports])
    for i, port in enumerate(ports):
        environ = loaded.environment(*groups.EDGE) | own | {"HEADRACE_PORT": str(port)}
        # One edge shows the workers' metrics too, so that a single page tells all and nothing is counted twice.
        environ |= {"HEADRACE_FEDERATE_METRICS": pages} if i == 0 else {}
        if "drain_handover" not in loaded.sources:
            environ["HEADRACE_DRAIN_HANDOVER"] = "false"  # there is no other edge: all of them stop together
        specs.append(ChildSpec(f"edge-{i + 1}", "edge", ("-m", "edge"), environ))
    host = loaded[HttpSettings].host
    shown = _LOCAL if host in ("0.0.0.0", "::", "") else host
    return Plan(
        specs=tuple(specs),
        urls=tuple(f"http://{shown}:{port}" for port in ports),
        worker_urls={f"worker-{i + 1}": f"http://{_LOCAL}:{port}" for i, port in enumerate(metrics_ports)},
        key=next(iter(accepted_keys(loaded[ApiSettings])), ""),
    )


def _worker_environ(loaded: Loaded, model: str, number: int, metrics_port: int) -> dict[str, str]:
    environ = loaded.environment(*groups.WORKER)
    environ |= {
        "HEADRACE_MODEL": model,
        "HEADRACE_METRICS_PORT": str(metrics_port),
        "HEADRACE_METRICS_ENGINE": str(number),
    }
    if loaded[WorkerSettings].worker_name and loaded[ServeSettings].workers > 1:
        environ["HEADRACE_WORKER_NAME"] = f"{loaded[WorkerSettings].worker_name}-{number + 1}"
    names = loaded[ModelSettings].served_model_name
    if model != loaded[ModelSettings].model and not names:
        environ["HEADRACE_SERVED_MODEL_NAME"] = DEMO
    if loaded[ComputeSettings].num_threads == 0 and loaded[ServeSettings].workers > 1:
        share = max(1, len(os.sched_getaffinity(0)) // loaded[ServeSettings].workers)
        environ["HEADRACE_NUM_THREADS"] = str(share)
    fraction = loaded[KvCacheSettings].kv_cache_memory_fraction / loaded[ServeSettings].workers
    environ["HEADRACE_KV_CACHE_MEMORY_FRACTION"] = str(fraction)  # all of them plan before any has filled its cache
    return environ


def wait_until_ready(supervisor: Supervisor, plan: Plan, timeout_s: float, stop: Stop) -> str:
    """Start everything and wait until all workers are ready and the first edge lists their model; its name.

    Raises `ChildFailed`, `StartFailed`. Returns an empty name when a stop is asked for meanwhile.
    """
    started = said = time.monotonic()
    say(f"starting {', '.join(spec.name for spec in plan.specs)}")
    while not stop.asked:
        supervisor.check()
        name = served_name(plan)
        if name:
            supervisor.all_ready()
            say(f"ready after {time.monotonic() - started:.1f} s")
            return name
        now = time.monotonic()
        if now - started > timeout_s:
            raise StartFailed(f"not ready within start_timeout_s ({timeout_s:g} s)")
        if now - said > _PROGRESS_S:
            said = now
            say(f"loading the model, {now - started:.0f} s so far")
        time.sleep(_POLL_S)
    return ""


def served_name(plan: Plan) -> str:
    """The model's name once every worker and the first edge are ready and the edge lists it; until then empty."""
    pages = [_get(f"{url}/ready") and _get(f"{url}/metrics") for url in plan.worker_urls.values()]
    if not all(pages) or not _get(f"{plan.urls[0]}/ready"):
        return ""
    found = _MODEL_LABEL.search(pages[0])
    name = found.group(1) if found else ""
    listed = json.loads(_get(f"{plan.urls[0]}/v1/models", plan.key) or '{"data": []}')["data"]
    return name if any(model["id"] == name for model in listed) else ""


def _get(url: str, key: str = "") -> str:
    """Body of a 200, else an empty text."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            body: bytes = answer.read()
            return body.decode()
    except (urllib.error.URLError, OSError, ValueError):
        return ""


class Announcement:
    """``serve.json``: where the system is and which processes it has, for programs."""

    def __init__(self, path: Path, plan: Plan, name: str, log_url: str) -> None:
        self._path = path
        self._facts = {"url": plan.urls[0], "urls": plan.urls, "model": name, "pid": os.getpid()}
        self._facts |= {"log": log_url} if log_url else {}
        self._children: Mapping[str, int] = {}

    def write(self, children: Mapping[str, int]) -> None:
        """All of it, with the pids of ``children`` by name; readers meanwhile see the old. Raises `StartFailed`."""
        self._children = children
        partial = self._path.with_name(f"{self._path.name}.partial")
        try:
            partial.write_text(json.dumps({**self._facts, "children": children}, indent=2) + "\n", encoding="utf-8")
            partial.replace(self._path)
        except OSError as error:
            raise StartFailed(f"{self._path} cannot be written: {error.strerror}") from error

    def update(self, children: Mapping[str, int]) -> None:
        """Write it again when other children live than it tells. One that cannot be written is said, and left."""
        if children == self._children:
            return
        try:
            self.write(children)
        except StartFailed as error:  # a full disk is no reason to stop what runs
            say(error.message)


def invitation(plan: Plan, name: str) -> str:
    """Where it is, with a line to try it."""
    url = plan.urls[0]
    body = {"model": name, "messages": [{"role": "user", "content": "Say hello"}], "max_tokens": 40, "stream": True}
    key = ["  -H 'Authorization: Bearer YOUR_KEY' \\"] if plan.key else []
    lines = [
        "",
        f"Headrace serves {name} at {url}/v1",
        *(f"  and at {other}/v1" for other in plan.urls[1:]),
        "",
        f"  curl -N {url}/v1/chat/completions \\",
        *key,
        "  -H 'Content-Type: application/json' \\",
        f"  -d {shlex.quote(json.dumps(body))}",
        "",
        "Ctrl-C stops it in order; a second one at once.",
    ]
    return "\n".join(lines)


def shut_down(supervisor: Supervisor, loaded: Loaded, is_forced: Callable[[], bool]) -> None:
    """Edges first, then workers, each within its own time; then the caller stops the log."""
    stream = loaded[StreamSettings]
    if not is_forced():
        say("stopping")
    supervisor.stop("edge", stream.drain_notice_s + stream.drain_timeout_s + 5.0, is_forced)
    supervisor.stop("worker", loaded[WorkerSettings].worker_drain_timeout_s + 5.0, is_forced)


def say(line: str) -> None:
    print(f"headrace serve: {line}", flush=True)
