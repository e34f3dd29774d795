"""Who listens and says nothing is silent; who does not listen, answers, or is stopped on purpose is not."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cli.pulse import Pulse
from tests.servers import free_port

PATIENCE = 2


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def mute() -> Iterator[str]:
    """A listener whose process never gets to accept."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def healthy() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def watching(*, interval_s: float = 0.05, patience: int = PATIENCE, **urls: str) -> Iterator[Pulse]:
    pulse = Pulse(urls, interval_s=interval_s, patience=patience)
    pulse.start()
    yield pulse
    pulse.stop()


@contextlib.contextmanager
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def eventually(condition: Callable[[], object], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def test_who_listens_and_says_nothing_is_silent_again_and_again(mute: str) -> None:
    with child() as process, watching(mute=mute) as pulse:
        for _ in range(2):
            eventually(lambda: pulse.take_silent({"mute": process.pid}) == ["mute"])


def test_who_answers_or_does_not_listen_is_not(mute: str, healthy: str) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    urls = {"nobody": nobody, "healthy": healthy, "mute": mute}
    # Somebody healthy on a busy machine needs more than a moment, but not four times in a row.
    with child() as process, watching(interval_s=0.5, patience=4, **urls) as pulse:
        eventually(lambda: pulse._unanswered["mute"] >= 4)
        assert pulse.take_silent(dict.fromkeys(urls, process.pid)) == ["mute"]


def test_who_is_stopped_or_gone_is_let_be(mute: str) -> None:
    with child() as process, watching(mute=mute) as pulse:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped
        eventually(lambda: pulse._unanswered["mute"] >= PATIENCE)
        assert pulse.take_silent({}) == []
        eventually(lambda: pulse._unanswered["mute"] >= PATIENCE)
        assert pulse.take_silent({"mute": process.pid}) == []


def test_whoever_answers_has_all_of_it_read_and_is_not_hung_up_on() -> None:
    body = b"x" * (1 << 22)  # more than fits between the two
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        with watching(worker=f"http://127.0.0.1:{listener.getsockname()[1]}", interval_s=60 / 1000):
            answered, _ = listener.accept()
            with answered:
                answered.settimeout(60)
                assert answered.recv(1 << 16).startswith(b"GET /health ")
                answered.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                assert answered.recv(1) == b"", "closed in order, not reset"
