from __future__ import annotations

import itertools

import pytest

from common.events import SamplingParams
from engine_worker.scheduler import policy
from engine_worker.scheduler.policy import FairShare, WaitingQueue
from engine_worker.sequence import Sequence, SequenceStatus

_ids = itertools.count()


def sequence(tenant: str = "", *, priority: int = 0, arrival_s: float = 0.0) -> Sequence:
    return Sequence(
        seq_id=next(_ids),
        request_id="r",
        choice=0,
        prompt_token_ids=(1,),
        sampling=SamplingParams(max_tokens=1),
        max_model_len=8,
        tenant=tenant,
        priority=priority,
        arrival_s=arrival_s,
    )


def drain(queue: WaitingQueue) -> list[Sequence]:
    return [queue.pop() for _ in range(len(queue))]


def test_priority_first_then_arrival_then_order_of_addition() -> None:
    queue = WaitingQueue(FairShare())
    late, early = sequence(arrival_s=2), sequence(arrival_s=1)
    first, second = sequence(arrival_s=3), sequence(arrival_s=3)
    urgent = sequence(priority=-1, arrival_s=9)
    for item in (late, second, first, urgent, early):
        queue.push(item)
    assert drain(queue) == [urgent, early, late, first, second]


def test_the_tenant_that_got_least_for_its_weight_is_next() -> None:
    shares, weights = FairShare(), {"big": 3.0, "small": 1.0}
    queue = WaitingQueue(shares)
    for i in range(8):
        queue.push(sequence("big", arrival_s=i))
        queue.push(sequence("small", arrival_s=i))
    order = []
    for _ in range(8):
        item = queue.pop()
        order.append(item.tenant)
        shares.charge(item.tenant, 30, weights[item.tenant])
    assert order.count("big") == 6


def test_a_tenant_that_comes_back_has_saved_up_no_credit() -> None:
    shares = FairShare()
    shares.charge("busy", 1000, 1.0)
    shares.charge("other", 700, 1.0)
    shares.welcome("new", {"busy", "other"})
    assert shares.served("new") == 700
    shares.welcome("busy", {"other"})
    assert shares.served("busy") == 1000


def test_idle_tenants_are_forgotten_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MAX_TENANTS", 3)
    shares = FairShare()
    for tenant in "abc":
        shares.charge(tenant, 10, 1.0)
    shares.welcome("d", {"a"})
    assert [shares.served(tenant) for tenant in "abcd"] == [10, 0, 0, 10]


def test_what_finished_while_it_waited_is_skipped() -> None:
    queue = WaitingQueue(FairShare())
    gone, stays = sequence(arrival_s=1), sequence(arrival_s=2)
    queue.push(gone)
    queue.push(stays)
    gone.status = SequenceStatus.FINISHED
    queue.discard(gone)
    assert (len(queue), list(queue), queue.peek()) == (1, [stays], stays)
    assert queue.pop() is stays
    assert queue.peek() is None
