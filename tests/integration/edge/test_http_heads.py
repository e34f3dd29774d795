"""Clients that do not get as far as a request: malformed, endless and slow heads."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from edge.http_protocol import MAX_HEAD_BYTES, BoundedProtocol
from tests.integration.edge.running_edge import ThreadedEdge

HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def connection(edge: ThreadedEdge) -> Iterator[socket.socket]:
    host, port = edge.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as sock:
        yield sock


def everything(sock: socket.socket) -> bytes:
    """What the server says until it closes the connection."""
    parts = []
    while part := sock.recv(65536):
        parts.append(part)
    return b"".join(parts)


def refused_with(answer: bytes) -> int:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    return int(head.split()[1])


def test_bytes_that_are_not_http_get_an_error_object(connection: socket.socket) -> None:
    connection.sendall(b"\x00\x01\r\n\r\n")
    assert refused_with(everything(connection)) == 400


def test_an_endless_head_is_cut(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"X: ")
    try:
        for _ in range(0, 16 * MAX_HEAD_BYTES, 4096):
            connection.sendall(b"a" * 4096)
        answer = everything(connection)
    except ConnectionError:  # closed with bytes of ours unread
        return
    assert refused_with(answer) == 431


def test_a_long_head_within_the_bound_is_served(connection: socket.socket) -> None:
    connection.sendall(HEAD + b"Connection: close\r\nX: " + b"a" * (MAX_HEAD_BYTES // 2) + b"\r\n\r\n")
    assert everything(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"", b"\r\n", HEAD])
def test_a_head_that_does_not_end_in_time_ends_the_connection(
    edge: ThreadedEdge, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_timeout_s", 1.5)
    host, port = edge.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=120) as sock:
        sock.sendall(sent)
        answer = everything(sock)
    assert refused_with(answer) == 408 if sent else not answer


def test_requests_in_a_row_and_blank_lines_between_them_are_served(connection: socket.socket) -> None:
    connection.sendall((HEAD + b"\r\n\r\n") * 3 + HEAD + b"Connection: close\r\n\r\n")
    assert everything(connection).count(b"HTTP/1.1 200 ") == 4
