"""Ending requests that nobody owns; of an owned one nothing is touched."""

from __future__ import annotations

import pytest

from common.errors import DeadlineExceeded, ModelUnavailable
from common.events import Failed
from common.transport import AppendStatus, FrameBus, GivingUp, RequestPhase, Resubscribed
from tests.behaviour.transport.world import World, ended, started, tokens

NOBODY = ModelUnavailable("nobody came")
LATE = DeadlineExceeded("too late")


async def end_of(world: World, request_id: str) -> tuple[int, Failed]:
    last = (await world.log(request_id))[-1]
    assert isinstance(last.event, Failed)
    return last.n, last.event


async def test_one_that_waits_is_ended_and_its_reader_is_told(world: World) -> None:
    worker = await world.worker("w1")
    async with FrameBus(world.client, "edge-a") as bus:
        signals = aiter(bus)
        assert await anext(signals) == Resubscribed()
        request = await world.submit_new()
        assert await GivingUp(world.client).give_up(request.request_id, NOBODY, begun_too=False)
        (frame,) = await anext(signals)  # type: ignore[misc]
    assert (frame.request_id, frame.n) == (request.request_id, 1)
    n, event = await end_of(world, request.request_id)
    assert (n, event.code, event.message) == (1, "model_unavailable", "nobody came")
    assert (await world.reading.status(request.request_id)).phase is RequestPhase.DONE
    assert await worker.ownership.claim(1) == []
    assert not await GivingUp(world.client).give_up(request.request_id, NOBODY, begun_too=False), "it is over"
    await world.assert_queues_clean()


@pytest.mark.parametrize("begun_too", [False, True])
async def test_one_that_has_an_owner_is_left_alone(world: World, begun_too: bool) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    owned = await worker.claim_one()
    assert not await GivingUp(world.client).give_up(request.request_id, LATE, begun_too=begun_too)
    await worker.finish(owned)
    await world.assert_queues_clean()


async def test_what_a_dead_worker_has_begun_is_ended_only_when_that_is_asked_for(world: World) -> None:
    dead, heir = await world.worker("w1"), await world.worker("w2")
    request = await world.submit_new()
    owned = await dead.claim_one()
    await dead.append(owned, 1, started(1), tokens(1, 4))
    dead.die()
    giving_up = GivingUp(world.client)
    assert not await giving_up.give_up(request.request_id, NOBODY, begun_too=False)
    assert await giving_up.give_up(request.request_id, LATE, begun_too=True)
    assert (await end_of(world, request.request_id))[0] == 3
    assert await heir.ownership.takeover_scan(8) == []
    dead.lease.renew()  # it was merely frozen
    assert (await dead.append(owned, 3, ended(1), is_final=True)).status is AppendStatus.FENCED
    await world.assert_queues_clean()


async def test_what_was_handed_over_counts_as_begun(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    owned = await worker.claim_one()
    await worker.append(owned, 1, started(1), tokens(1, 4))
    assert await worker.ownership.release(request.request_id)
    giving_up = GivingUp(world.client)
    assert not await giving_up.give_up(request.request_id, NOBODY, begun_too=False)
    assert await giving_up.give_up(request.request_id, LATE, begun_too=True)
    assert (await end_of(world, request.request_id))[0] == 3
    await world.assert_queues_clean()


async def test_one_that_nobody_knows_is_nobodys(world: World) -> None:
    request = world.request()
    assert not await GivingUp(world.client).give_up(request.request_id, NOBODY, begun_too=True)
