"""A trace is found by its request id."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.telemetry.trace_ids import trace_id_hex, trace_id_of, traceparent_trace_id

HEX = "0192f0c1a2b37c4d8e5f60718293a4b5"
PARENT = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}


@pytest.mark.parametrize(
    "request_id",
    [HEX, f"req_{HEX}", f"chatcmpl-{HEX}", "0192f0c1-a2b3-7c4d-8e5f-60718293a4b5", f"req_{HEX.upper()}"],
)
def test_a_request_id_that_ends_with_a_uuid_is_its_own_trace_id(request_id: str) -> None:
    assert trace_id_hex(request_id) == HEX


@pytest.mark.parametrize("request_id", ["order 7", f"a{HEX}", f"{HEX}-2", "é", ""])
def test_any_other_request_id_is_hashed(request_id: str) -> None:
    assert trace_id_hex(request_id) == hashlib.sha256(request_id.encode()).hexdigest()[:32]


def test_the_client_s_traceparent_wins() -> None:
    assert trace_id_hex(f"req_{HEX}", PARENT) == "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00-x",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
    ],
)
def test_a_malformed_traceparent_is_no_traceparent(header: str) -> None:
    assert traceparent_trace_id({"traceparent": header}) is None


@given(st.text())
def test_every_request_id_has_a_valid_trace_id(request_id: str) -> None:
    assert 0 < trace_id_of(request_id) < 1 << 128


def test_a_uuid_of_zeros_is_not_an_invalid_trace_id() -> None:
    assert trace_id_of("0" * 32) != 0
