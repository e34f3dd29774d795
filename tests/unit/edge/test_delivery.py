"""Headers that say how an answer is wanted."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from common.errors import InvalidRequest
from edge.config import StreamSettings
from edge.delivery import Delivery, delivery_of

SETTINGS = StreamSettings(resume_grace_s=30.0)


def wanted(**headers: str) -> Delivery:
    given = Headers({name.replace("_", "-"): value for name, value in headers.items()})
    return delivery_of(given, SETTINGS, is_idempotent="idempotency_key" in headers)


def test_a_plain_request_gets_a_bare_stream_and_ends_with_its_reader() -> None:
    assert wanted() == Delivery()
    assert wanted().ends_with_reader


def test_a_resumable_one_gets_ids_and_outlives_its_reader() -> None:
    got = wanted(x_headrace_resumable="1")
    assert (got.with_ids, got.grace_s, got.ends_with_reader) == (True, 30.0, False)


@pytest.mark.parametrize("value", ["0", "false", ""])
def test_resumable_can_be_declined(value: str) -> None:
    assert wanted(x_headrace_resumable=value) == Delivery()


def test_a_position_asks_for_ids_and_the_rest() -> None:
    got = wanted(last_event_id="17.2", idempotency_key="k")
    assert (got.with_ids, got.after, got.after_chunks, got.is_resumed) == (True, 16, 2, True)


@pytest.mark.parametrize("position", ["17", "1.1"])
def test_a_position_without_a_key_is_refused_since_it_would_be_one_of_another_generation(position: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        wanted(last_event_id=position)
    assert refused.value.param == "Last-Event-ID"


@pytest.mark.parametrize("position", ["", "0"])
def test_the_position_before_everything_only_asks_for_ids(position: str) -> None:
    got = wanted(last_event_id=position)
    assert (got.with_ids, got.after, got.is_resumed) == (True, 0, False)


def test_a_keyed_request_outlives_its_reader_but_keeps_its_bare_stream() -> None:
    got = wanted(idempotency_key="k")
    assert (got.with_ids, got.grace_s) == (False, 30.0)


def test_asked_to_continue_it_never_ends_for_want_of_a_reader() -> None:
    assert wanted(x_headrace_on_disconnect="Continue").grace_s < 0


@pytest.mark.parametrize(("name", "value"), [("x_headrace_priority", "-3"), ("x_vllm_priority", "-3")])
def test_a_priority_is_taken_under_both_names(name: str, value: str) -> None:
    assert wanted(**{name: value}).priority == -3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("last_event_id", "soon"),
        ("x_headrace_on_disconnect", "maybe"),
        ("x_headrace_resumable", "bananas"),
        ("x_headrace_queue_status", "2"),
        ("x_headrace_priority", "high"),
        ("x_headrace_priority", "9" * 15),
    ],
)
def test_nonsense_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wanted(**{name: value})
    assert (caught.value.param or "").lower().replace("-", "_") == name
