"""Names and ids."""

from __future__ import annotations

import time
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.transport import Keys, QueueClass, idempotent_request_id, new_request_id

KEYS = Keys("h:", 16)


def test_a_new_id_names_a_partition_and_the_time() -> None:
    before = time.time_ns() // 1_000_000
    request_id = new_request_id(16)
    partition, _, tail = request_id.partition("-")
    value = uuid.UUID(tail)
    assert (value.version, value.variant) == (7, uuid.RFC_4122)
    assert before <= value.int >> 80 <= time.time_ns() // 1_000_000
    assert KEYS.partition(request_id) == int(partition) < 16
    assert new_request_id(1).startswith("0-")
    assert len({new_request_id(4) for _ in range(1000)}) == 1000


@given(st.text(), st.text(), st.integers(1, 64))
def test_a_key_of_a_tenant_has_one_id(tenant: str, key: str, partitions: int) -> None:
    request_id = idempotent_request_id(tenant, key, partitions)
    assert request_id == idempotent_request_id(tenant, key, partitions)
    assert Keys("h:", partitions).partition(request_id) < partitions
    assert request_id != idempotent_request_id(tenant + "x", key, partitions)


def test_tenant_and_key_cannot_be_shifted_into_each_other() -> None:
    assert idempotent_request_id("a:b", "c", 8) != idempotent_request_id("a", "b:c", 8)


@given(st.text())
def test_any_text_is_an_id_or_an_invalid_request(text: str) -> None:
    try:
        partition = KEYS.partition(text)
    except InvalidRequest:
        return
    assert 0 <= partition < 16


@pytest.mark.parametrize(
    "tail", ["}", "{1}:x", " ", "018f0000-0000-7000-8000-00000000000g", "{018f0000-0000-7000-8000-000000000000}"]
)
def test_nothing_can_be_smuggled_into_a_key(tail: str) -> None:
    with pytest.raises(InvalidRequest):
        KEYS.request(f"1-{tail}")


@pytest.mark.parametrize("partition", ["16", "01", "-1", "", "1" * 7, "\u0661"])
def test_only_a_canonical_partition_of_this_deployment_counts(partition: str) -> None:
    with pytest.raises(InvalidRequest):
        KEYS.partition(f"{partition}-018f0000-0000-7000-8000-000000000000")


def test_all_keys_of_a_request_share_its_hash_tag() -> None:
    request_id = "7-018f0000-0000-7000-8000-000000000000"
    names = [
        KEYS.request(request_id),
        KEYS.output(request_id),
        *KEYS.queues(7, "m"),
        KEYS.load(7, "m"),
        KEYS.dead_letters(7, "m"),
        KEYS.lease(7, "w"),
        KEYS.inbox(7, "w"),
        KEYS.bus(7, "e"),
    ]
    assert all(name.startswith("h:{7}:") for name in names)
    assert len(set(names)) == len(names)
    assert {KEYS.layout, KEYS.models, KEYS.workers} == {"h:{meta}:partitions", "h:{meta}:models", "h:{meta}:workers"}


def test_priorities_fall_into_three_classes() -> None:
    classes = [QueueClass.of_priority(priority) for priority in (-7, -1, 0, 1, 9)]
    assert classes == [QueueClass.HIGH, QueueClass.HIGH, QueueClass.NORMAL, QueueClass.LOW, QueueClass.LOW]
