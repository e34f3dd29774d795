"""The HTTP server around the application, and its orderly end.

SIGTERM or SIGINT: the readiness probe fails, while everything is still served for ``drain_notice_s`` so that balancers
notice and no request is lost; then nothing is accepted any more and running streams have until ``drain_timeout_s`` to
finish, but those whose clients can resume are handed over to other edges at once; what is left then ends with an
error, and what cannot even take that is cut. A second signal skips the rest. The process's exit status is 0.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Final

import uvicorn

from common.errors import ConfigError
from edge.http_protocol import BoundedProtocol

if TYPE_CHECKING:
    from types import FrameType

    from fastapi import FastAPI

    from edge.config import HttpSettings, StreamSettings
    from edge.lifecycle import Lifecycle

_LONGEST_S: Final = 86_400.0
CUT_AFTER_S: Final = 3.0  # from the end of draining to cutting readers that do not take their last words


class EdgeServer(uvicorn.Server):
    """uvicorn with our way of draining."""

    def __init__(self, app: FastAPI, http: HttpSettings, streams: StreamSettings, lifecycle: Lifecycle) -> None:
        super().__init__(_config(app, http, streams))
        self._streams = streams
        self._lifecycle = lifecycle
        self.loop: asyncio.AbstractEventLoop | None = None  # set at startup

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Closes the listening sockets before anything else, then waits for what is open, within bounds."""
        self._lifecycle.stop_listening()
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # its client takes nothing: the loop would wait for it when it is closed

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called by the signal handler, in the main thread but at any point of the program."""
        if self.loop is None or self.loop.is_closed():
            self.should_exit = True
        else:
            self.loop.call_soon_threadsafe(self.stop)

    def stop(self) -> None:
        """Begins the orderly end; a second call ends at once. On the event loop's thread."""
        if self._lifecycle.is_draining:
            self.should_exit = True
            self.force_exit = True
            return
        self._lifecycle.drain(self._streams.drain_notice_s + self._streams.drain_timeout_s)
        asyncio.get_running_loop().call_later(self._streams.drain_notice_s, self._close)

    def _close(self) -> None:
        self._lifecycle.close()
        self.should_exit = True


def _is_news(record: logging.LogRecord) -> bool:
    """An answer that was cut on purpose has been logged, if it had to be, by the one who cut it."""
    return not record.getMessage().startswith("ASGI callable returned without completing response")


logging.getLogger("uvicorn.error").addFilter(_is_news)


def bind(http: HttpSettings, send_timeout_s: float) -> socket.socket:
    """The listening socket. Raises `ConfigError` when the address cannot be had.

    The kernel ends connections whose clients take nothing for ``send_timeout_s``: closing alone would wait for them.
    """
    if http.uds:
        return _bind_unix(http.uds)
    family = socket.AF_INET6 if ":" in http.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux, where accepted sockets inherit it
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(min(send_timeout_s, _LONGEST_S) * 1000))
    if http.reuse_port:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((http.host, http.port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"host and port: cannot listen on {http.host}:{http.port}: {error.strerror}") from error
    sock.set_inheritable(False)
    return sock


def address_of(sock: socket.socket) -> str:
    """Where a bound socket can be reached, for people."""
    if sock.family == socket.AF_UNIX:
        return f"unix:{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _bind_unix(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigError(f"uds: cannot listen on {path}: {error.strerror}") from error
    return sock


def _config(app: FastAPI, http: HttpSettings, streams: StreamSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedProtocol,
        ws="none",
        lifespan="on",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=http.listen_backlog,
        timeout_keep_alive=http.keep_alive_timeout_s,
        timeout_graceful_shutdown=round(streams.drain_timeout_s + CUT_AFTER_S),
    )
