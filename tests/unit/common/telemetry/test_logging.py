"""Log lines: one JSON object each, with the request's identity, whoever logs."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from common.telemetry.logging import configure_logging, get_logger, request_context
from common.telemetry.settings import TelemetrySettings
from common.telemetry.tracing import Tracing


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level
    structlog.reset_defaults()


@pytest.fixture
def stream() -> io.StringIO:
    stream = io.StringIO()
    configure_logging("edge", TelemetrySettings(), stream=stream)
    return stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_level_time_service_and_logger(stream: io.StringIO) -> None:
    get_logger("edge.relay").info("reader attached", last_n=3, odd={1})
    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "reader attached",
        "last_n": 3,
        "odd": [1],
        "level": "info",
        "logger": "edge.relay",
        "service": "edge",
    }


def test_everything_inside_a_request_carries_its_identity(stream: io.StringIO) -> None:
    with request_context("req_0192f0c1a2b37c4d8e5f60718293a4b5", tenant="t"):
        get_logger("a").info("in")
        logging.getLogger("uvicorn.error").warning("foreign %d", 7)
    get_logger("a").info("out")
    inside, foreign, outside = lines(stream)
    assert inside["request_id"] == "req_0192f0c1a2b37c4d8e5f60718293a4b5"
    assert inside["trace_id"] == "0192f0c1a2b37c4d8e5f60718293a4b5"
    assert inside["tenant"] == "t"
    assert (foreign["event"], foreign["trace_id"]) == ("foreign 7", inside["trace_id"])
    assert "request_id" not in outside


def test_the_current_span_is_on_the_line(stream: io.StringIO) -> None:
    tracing = Tracing.with_processor("t", "1", SimpleSpanProcessor(InMemorySpanExporter()))
    with request_context("r1"), tracing.request("POST /x", "r1", {}) as span:
        get_logger("a").info("in")
    tracing.shutdown()
    (line,) = lines(stream)
    assert line["span_id"] == f"{span.get_span_context().span_id:016x}"
    assert line["trace_id"] == f"{span.get_span_context().trace_id:032x}"


def test_an_exception_is_text_inside_the_object(stream: io.StringIO) -> None:
    try:
        raise ValueError("wrong")
    except ValueError:
        get_logger("a").exception("failed")
    (line,) = lines(stream)
    assert "ValueError: wrong" in line["exception"]


def test_access_lines_of_the_server_are_left_out(stream: io.StringIO) -> None:
    logging.getLogger("uvicorn.access").info("GET /")
    assert stream.getvalue() == ""


def test_levels_below_the_setting_are_left_out() -> None:
    stream = io.StringIO()
    configure_logging("edge", TelemetrySettings(log_level="warning"), stream=stream)
    get_logger("a").info("no")
    get_logger("a").warning("yes")
    assert [line["event"] for line in lines(stream)] == ["yes"]


@pytest.mark.parametrize(
    ("log_format", "stream", "is_json"),
    [("auto", Terminal(), False), ("json", Terminal(), True), ("pretty", io.StringIO(), False)],
)
def test_a_terminal_gets_text_for_eyes_unless_told_otherwise(
    log_format: Any, stream: io.StringIO, is_json: bool
) -> None:
    configure_logging("edge", TelemetrySettings(log_format=log_format), stream=stream)
    get_logger("a").info("hello", answer=42)
    assert stream.getvalue().startswith("{") is is_json
    assert "hello" in stream.getvalue()


def test_a_traceback_for_eyes_shows_no_variables() -> None:
    stream = io.StringIO()
    configure_logging("edge", TelemetrySettings(log_format="pretty"), stream=stream)
    secret = "".join(["sk-", "secret"])  # noqa: F841 - stands in the frame
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        get_logger("a").error("failed", exc_info=True)
    assert "broken" in stream.getvalue()
    assert "sk-secret" not in stream.getvalue()
