"""Real servers for tests: standalone and cluster, on loopback, in throw-away directories; kill and restart at will.

Servers here are started bare, not by `common.transport.embedded`, which has tests of its own.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from common.transport.embedded import find_binary

_START_S = 60.0
_FAILOVER_TIMEOUT_S = 3.0
_given: set[int] = set()  # ports that this process has handed out


def free_port() -> int:
    """A loopback port that nobody listens on, nor on the one 10,000 above it, which is a cluster's bus.

    Both lie below the ports that the system gives to outgoing connections, so that none of these takes one between
    this look and the server's start; and two processes that look at the same time rarely look at the same one.
    """
    while True:
        port = random.SystemRandom().randrange(11_000, 22_000)
        if port not in _given and _is_free(port) and _is_free(port + 10_000):
            _given.add(port)
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def debian_redis() -> Path | None:
    """The distribution's redis-server when it is on PATH."""
    found = shutil.which("redis-server")
    return Path(found) if found else None


class Server:
    """One server process. ``fsync`` None: no append-only file, so a restart loses everything."""

    def __init__(
        self,
        *,
        binary: Path | None = None,
        fsync: str | None = "always",
        port: int | None = None,
        options: dict[str, str] | None = None,
    ) -> None:
        self.binary = binary or find_binary(None)
        self.port = port or free_port()
        self.directory = Path(tempfile.mkdtemp(prefix="headrace-test-"))
        known = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": str(self.directory),
            "logfile": str(self.directory / "server.log"),
            "save": "",
            "appendonly": "yes" if fsync else "no",
            "appendfsync": fsync or "no",
            "repl-diskless-sync-delay": "0",
            **(options or {}),
        }
        self.arguments = [text for name, value in known.items() for text in (f"--{name}", value)]
        self.environ: dict[str, str] | None = None  # of the process; None: as this one's
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> Server:
        """Start (again) and wait until it has loaded its log."""
        self._process = subprocess.Popen(
            [str(self.binary), *self.arguments],
            cwd=self.directory,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(redis.ConnectionError, redis.TimeoutError), self.client() as client:
                client.execute_command("PING")
                return self
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(self._last_words())
            time.sleep(0.02)

    def _last_words(self) -> str:
        log = self.directory / "server.log"
        return log.read_text()[-2000:] if log.exists() else "the server left no log"

    def client(self) -> Any:
        """A plain synchronous client, for looking behind the transport."""
        return redis.Redis(port=self.port, protocol=2, socket_timeout=5, retry=Retry(NoBackoff(), 0), driver_info=None)

    def wait_for_replica(self) -> None:
        """Until one acknowledges what is written."""
        deadline = time.monotonic() + _START_S
        with self.client() as client:
            client.set("a-replica-is-there", 1)
            while client.wait(1, 500) < 1:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no replica: {client.info('replication')}")

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def follow(self, primary: Server) -> None:
        """From the next start on it is a replica of ``primary``, as configuration management would have it."""
        if "--replicaof" in self.arguments:
            at = self.arguments.index("--replicaof")
            del self.arguments[at : at + 2]
        self.arguments += ["--replicaof", f"127.0.0.1 {primary.port}"]

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: the server keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """End the process and remove its directory."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def flush(self) -> None:
        with self.client() as client:
            client.execute_command("FLUSHALL")


class Sentinel(Server):
    """One sentinel that watches ``primary`` under the name ``log``."""

    def __init__(self, primary: Server) -> None:
        super().__init__(fsync=None)
        config = self.directory / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind 127.0.0.1\nsentinel monitor log 127.0.0.1 {primary.port} 1\n"
            "sentinel down-after-milliseconds log 1000\n"
            f"sentinel failover-timeout log {1000 * _FAILOVER_TIMEOUT_S:.0f}\n"
        )
        self.arguments = [str(config), "--sentinel"]

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.port}/log"

    def wait_for_replica(self) -> None:
        """Until it has found one to fail over to."""
        deadline = time.monotonic() + _START_S
        with self.client() as client:
            while int(client.info("sentinel")["master0"]["slaves"]) < 1:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"no replica: {client.info('sentinel')}")
                time.sleep(0.05)


class Watched:
    """A primary with replicas, watched by one sentinel; `fail_over` replaces the primary."""

    def __init__(self, replicas: int, *, fsync: str = "everysec", options: dict[str, str] | None = None) -> None:
        self.primary = Server(fsync=fsync, options=options)
        following = {**(options or {}), "replicaof": f"127.0.0.1 {self.primary.port}"}
        self.replicas = [Server(fsync=fsync, options=following) for _ in range(replicas)]
        self.sentinel = Sentinel(self.primary)

    @property
    def url(self) -> str:
        return self.sentinel.url

    @property
    def nodes(self) -> list[Server]:
        return [self.primary, *self.replicas]

    def start(self) -> Watched:
        for server in self.nodes:
            server.start()
        self.primary.wait_for_replica()
        self.sentinel.start()
        self.sentinel.wait_for_replica()
        return self

    def present(self) -> Server:
        """The primary that the sentinel names now."""
        with self.sentinel.client() as client:
            _, port = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "log")
        return next(node for node in self.nodes if node.port == int(port))

    def fail_over(self, *, frozen: bool) -> None:
        """The primary dies, or only freezes; another is named; then the old one comes back, as a replica."""
        old = self.present()
        old.pause() if frozen else old.kill()
        _until(lambda: self.present() is not old, "no new primary")
        if frozen:  # it is a second primary until the sentinel sees it, after eight seconds or more
            old.resume()
        else:
            old.follow(self.present())
            old.start()
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        """Every other node follows the primary, and the sentinel knows it."""
        _until(lambda: follows_all(self.present(), self.nodes), "a node does not follow the primary")
        time.sleep(2 * _FAILOVER_TIMEOUT_S)  # so long a sentinel does not fail over again

    def stop(self) -> None:
        for server in (self.sentinel, *self.nodes):
            server.stop()


def follows_all(primary: Server, nodes: list[Server]) -> bool:
    """Whether all nodes but ``primary`` are its replicas, and up to date."""
    with primary.client() as client:
        role = client.execute_command("ROLE")
        online = client.info("replication")["connected_slaves"]
    return role[0] == b"master" and online == len(nodes) - 1 and all(_is_linked(n) for n in nodes if n is not primary)


def _is_linked(node: Server) -> bool:
    with node.client() as client:
        facts = client.info("replication")
    return bool(facts["role"] == "slave" and facts["master_link_status"] == "up")


def _until(condition: Callable[[], bool], complaint: str) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
            if condition():
                return
        if time.monotonic() > deadline:
            raise RuntimeError(complaint)
        time.sleep(0.05)


class Cluster:
    """Primaries that share the slots, each with ``replicas``."""

    def __init__(self, size: int = 3, *, replicas: int = 0, options: dict[str, str] | None = None) -> None:
        known = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": "1000" if replicas else "30000",  # where none can take over nobody is given up
            "cluster-require-full-coverage": "no",
            "cluster-replica-validity-factor": "0",
            **(options or {}),
        }
        self.primaries = [Server(options=known, fsync="everysec") for _ in range(size)]
        self.followers = [Server(options=known, fsync="everysec") for _ in range(size * replicas)]

    @property
    def nodes(self) -> list[Server]:
        return [*self.primaries, *self.followers]

    @property
    def url(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)

    def start(self) -> Cluster:
        for node in self.nodes:
            node.start()
        share = 16_384 // len(self.primaries) + 1
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(node.client()) for node in self.nodes]
            for index, client in enumerate(clients):
                if index < len(self.primaries):
                    last = min((index + 1) * share, 16_384) - 1
                    client.execute_command("CLUSTER", "ADDSLOTSRANGE", index * share, last)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
            for node in self.nodes[1:]:
                clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", node.port)
            _until(lambda: all(_knows_all(client, len(self.nodes)) for client in clients), "the cluster does not form")
            for index, client in enumerate(clients[len(self.primaries) :]):
                primary = clients[index % len(self.primaries)].execute_command("CLUSTER", "MYID")
                client.execute_command("CLUSTER", "REPLICATE", primary)
        if self.followers:
            self.wait_until_whole()
        return self

    def fail_over(self, index: int, *, frozen: bool) -> None:
        """A primary dies, or only freezes; its replica takes its slots; then it comes back and follows."""
        acting = [node for node in self.nodes if not _is_follower(node)]
        old = acting[index % len(acting)]
        old.pause() if frozen else old.kill()
        others = [node for node in self.nodes if node is not old]
        _until(lambda: sum(not _is_follower(node) for node in others) == len(self.primaries), "no new primary")
        old.resume() if frozen else old.start()
        self.wait_until_whole()

    def wait_until_whole(self) -> None:
        """Every follower is up to date, and all agree on the slots."""
        _until(self._is_whole, "the cluster does not get whole")

    def _is_whole(self) -> bool:
        following = [_is_follower(node) for node in self.nodes]
        linked = [_is_linked(node) for node, follows in zip(self.nodes, following, strict=True) if follows]
        return len(linked) == len(self.followers) and all(linked)

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def flush(self) -> None:
        for node in self.primaries:
            node.flush()


def _is_follower(node: Server) -> bool:
    with node.client() as client:
        return bool(client.execute_command("ROLE")[0] != b"master")


def _knows_all(client: Any, size: int) -> bool:
    reply = client.execute_command("CLUSTER INFO")
    facts: dict[str, str] = reply if isinstance(reply, dict) else {}
    return facts.get("cluster_state") == "ok" and int(facts.get("cluster_known_nodes", 0)) == size


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    """Start the server, and stop it whatever happens."""
    try:
        yield server.start()
    finally:
        server.stop()
