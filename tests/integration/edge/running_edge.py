"""An edge with its real server, in a thread of the test's process or in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from common.telemetry.tracing import Tracing
from common.transport import RedisSettings
from edge.app import EdgeSettings, create_app
from edge.config import CatalogSettings, HttpSettings, StreamSettings
from edge.dependencies import Services
from edge.lifecycle import Lifecycle
from edge.server import EdgeServer, address_of, bind
from tests.servers import free_port

START_S = 100.0
FAST = StreamSettings(drain_notice_s=0.0, drain_timeout_s=5.0, quiet_check_s=0.2, first_frame_hold_s=1.0)


class ThreadedEdge:
    """In a thread, with its own event loop; `stop` drains it."""

    def __init__(self, redis: RedisSettings, tracing: Tracing | None = None, **groups: Any) -> None:
        usual = {
            "http": HttpSettings(host="127.0.0.1", port=0),
            "streams": FAST,
            "catalog": CatalogSettings(catalog_refresh_s=0.1),
            "redis": redis,
        }
        self.settings = EdgeSettings(**{**usual, **groups})
        http = self.settings.http
        self.socket = bind(http, self.settings.streams.send_timeout_s)
        self.url = address_of(self.socket)
        lifecycle = Lifecycle()
        self.app = create_app(self.settings, lifecycle, tracing or Tracing.off())
        self._server = EdgeServer(self.app, http, self.settings.streams, lifecycle)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self.socket]}, daemon=True)

    def start(self, *, until: str = "/ready") -> ThreadedEdge:
        self._thread.start()
        wait_for(f"{self.url}{until}")
        return self

    @property
    def services(self) -> Services:
        services: Services = self.app.state.services
        return services

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._server.server_state.connections)

    def in_loop(self, call: Any) -> None:
        """Run ``call`` on the edge's own event loop."""
        loop = self._server.loop
        assert loop is not None
        loop.call_soon_threadsafe(call)

    def begin_stop(self) -> None:
        self.in_loop(self._server.stop)

    def join(self, timeout_s: float = 100.0) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), "the edge did not stop"

    def stop(self) -> None:
        if self._thread.is_alive():
            self.begin_stop()
            self.join()


class EdgeProcess:
    """``python -m edge`` as an operator starts it."""

    def __init__(self, redis: RedisSettings, **settings: object) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        given = {
            "redis_url": redis.redis_url,
            "key_prefix": redis.key_prefix,
            "host": "127.0.0.1",
            "port": self.port,
            "catalog_refresh_s": 0.1,
            "log_format": "json",
            **settings,
        }
        environ = {f"HEADRACE_{name.upper()}": str(value) for name, value in given.items()}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process; a pipe would fill up
        self.process = subprocess.Popen([sys.executable, "-m", "edge"], env={**os.environ, **environ}, stderr=self._log)

    def start(self) -> EdgeProcess:
        try:
            wait_for(f"{self.url}/ready", lives=lambda: self.process.poll() is None)
        except AssertionError as error:
            self.process.kill()
            raise AssertionError(f"{error}; exit status and log: {self.wait()}") from error
        return self

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 100.0) -> tuple[int, str]:
        """Exit status and everything it logged."""
        status = self.process.wait(timeout_s)
        self._log.seek(0)
        return status, self._log.read()

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        self.process.kill()
        self.process.wait()
        self._log.close()


def wait_for(url: str, *, lives: Callable[[], bool] = lambda: True) -> None:
    """Until ``url`` answers 200."""
    deadline = time.monotonic() + START_S
    last = "no answer"
    while lives() and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except urllib.error.HTTPError as error:
            last = error.read().decode()
            error.close()
        except OSError as error:
            last = str(error)
        time.sleep(0.02)
    raise AssertionError(f"{url}: {last}")
