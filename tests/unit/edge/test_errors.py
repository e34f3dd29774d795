"""Errors to answers: one table, bounded texts, nothing of the inside."""

from __future__ import annotations

import json

import pytest

from common import errors
from edge import errors as edge_errors
from edge.errors import MAX_MESSAGE_CHARS, MAX_RETRY_AFTER_S, error_answer


def kinds(of: type[errors.HeadraceError]) -> list[type[errors.HeadraceError]]:
    return [kind for sub in of.__subclasses__() for kind in (sub, *kinds(sub)) if not kind.__name__.startswith("_")]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (errors.InvalidRequest("x", param="top_p"), 400, "invalid_request"),
        (errors.ContextOverflow("x"), 400, "context_length_exceeded"),
        (edge_errors.Unauthorized("x"), 401, "invalid_api_key"),
        (errors.ModelNotFound("x"), 404, "model_not_found"),
        (edge_errors.MethodNotAllowed("x", allow="GET"), 405, "method_not_allowed"),
        (errors.IdempotencyConflict("x"), 409, "idempotency_conflict"),
        (errors.StreamExpired("x"), 410, "stream_expired"),
        (edge_errors.BodyTooLarge("x"), 413, "request_too_large"),
        (errors.Overloaded("x"), 429, "overloaded"),
        (errors.ModelUnavailable("x"), 503, "model_unavailable"),
        (errors.LogUnavailable("x"), 503, "log_unavailable"),
        (errors.EngineError("x"), 500, "engine_error"),
        (errors.DeadlineExceeded("x"), 504, "deadline_exceeded"),
        (errors.StreamGap(expected=1, got=3), 500, "internal_error"),
        (RuntimeError("x"), 500, "internal_error"),
    ],
)
def test_each_kind_has_its_status_and_code(error: Exception, status: int, code: str) -> None:
    answer = error_answer(error, "id-1")
    shown = json.loads(answer.body)["error"]
    assert (answer.status, shown["code"], answer.headers["Content-Type"]) == (status, code, "application/json")
    assert "id-1" in shown["message"]
    assert shown["param"] == getattr(error, "param", None)


@pytest.mark.parametrize("kind", kinds(errors.HeadraceError), ids=lambda kind: kind.__name__)
def test_every_error_of_ours_can_be_shown(kind: type[errors.HeadraceError]) -> None:
    error = kind(expected=1, got=2) if kind is errors.StreamGap else kind("text")
    assert 400 <= error_answer(error).status < 600


@pytest.mark.parametrize(
    "error", [errors.LogUnavailable("redis://10.0.0.7"), errors.LogCorrupt("/srv/x"), OSError("/srv")]
)
def test_the_inside_is_not_shown(error: Exception) -> None:
    assert str(error) not in error_answer(error).body.decode()


def test_an_echo_is_bounded_and_clean() -> None:
    message = json.loads(error_answer(errors.InvalidRequest("\x00\x1b[31m" + "x" * 10_000)).body)["error"]["message"]
    assert len(message) <= MAX_MESSAGE_CHARS + 1
    assert message.startswith("  [31m")


@pytest.mark.parametrize("seconds", [0.0, 0.2, 7.0, 3600.0])
def test_retry_after_is_whole_jittered_and_never_too_long(seconds: float) -> None:
    got = {int(error_answer(errors.Overloaded("x", retry_after_s=seconds)).headers["Retry-After"]) for _ in range(50)}
    assert min(got) >= max(1, min(seconds, MAX_RETRY_AFTER_S))
    assert max(got) <= min(max(2, 1.25 * seconds + 1), MAX_RETRY_AFTER_S)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (errors.TenantLimitReached("x"), "false"),
        (edge_errors.Draining("x"), "true"),
        (errors.Quarantined("x"), "false"),
        (errors.EngineError("x"), "true"),
        (errors.Overloaded("x"), None),
    ],
)
def test_clients_are_told_where_a_retry_cannot_help(error: Exception, told: str | None) -> None:
    assert error_answer(error).headers.get("x-should-retry") == told
