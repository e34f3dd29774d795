"""/metrics, /health and /ready of a process without an HTTP API, on a thread with the standard library's server."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CollectorRegistry, generate_latest

from common.telemetry.logging import get_logger
from common.telemetry.metrics import CONTENT_TYPE
from common.telemetry.settings import MetricsServerSettings

log: Final = get_logger(__name__)

Readiness = Callable[[], str | None]  # None = ready, else the reason why not


class MetricsServer:
    """Listens from construction on; `close` stops it. Raises ``OSError`` when the address cannot be bound."""

    def __init__(self, settings: MetricsServerSettings, registry: CollectorRegistry, not_ready: Readiness) -> None:
        handler = _handler(registry, not_ready)
        self._server = _Server((settings.metrics_host, settings.metrics_port), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics-server", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asks may hang up at any moment, which nobody needs to know."""
        error = sys.exception()
        if not isinstance(error, OSError):
            log.error("page failed", exc_info=error)


def _handler(registry: CollectorRegistry, not_ready: Readiness) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30

        def do_GET(self) -> None:
            status, content_type, body = self._answer()
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

        def _answer(self) -> tuple[int, str, bytes]:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                return 200, CONTENT_TYPE, generate_latest(registry)
            if path == "/health":
                return 200, "text/plain", b"ok\n"
            if path == "/ready":
                reason = not_ready()
                return (200, "text/plain", b"ready\n") if reason is None else (503, "text/plain", reason.encode())
            return 404, "text/plain", b"/metrics, /health and /ready are here\n"

        def log_message(self, *_arguments: Any) -> None:
            """Scrapes are not logged."""

    return Handler
