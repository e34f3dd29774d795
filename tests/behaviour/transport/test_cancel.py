"""Cancelling: at once while queued, by its owner while running, harmless otherwise."""

from __future__ import annotations

import asyncio

from common.events import (
    Cancel,
    CancelReason,
    ChoiceFinished,
    Ended,
    FinishReason,
    Usage,
    decode_output,
)
from common.request_state import fold
from common.transport import CancelOutcome, FrameBus, RequestPhase, Resubscribed
from tests.behaviour.transport.world import World, ended, started, tokens


async def test_a_queued_request_ends_at_once(world: World) -> None:
    request = world.request(n=2)
    await world.submit(request)
    assert await world.submission.cancel(request.request_id, CancelReason.API, "edge-a") is CancelOutcome.ENDED
    log = await world.log(request.request_id)
    assert [type(item.event) for item in log] == [ChoiceFinished, ChoiceFinished, Ended]
    state = fold(log)
    assert state.cancelled is CancelReason.API
    assert {choice: state.choice(choice).finish_reason for choice in (0, 1)} == dict.fromkeys(
        (0, 1), FinishReason.CANCELLED
    )
    assert state.usage == Usage(prompt_tokens=3)
    status = await world.reading.status(request.request_id)
    assert (status.phase, status.cancel, status.cancelled_by) == (RequestPhase.DONE, CancelReason.API, "edge-a")
    await world.assert_queues_clean()
    worker = await world.worker("w1")
    assert await worker.ownership.claim(1) == []


async def test_cancelling_again_is_harmless(world: World) -> None:
    request = await world.submit_new()
    cancel = world.submission.cancel
    assert await cancel(request.request_id, CancelReason.API, "a") is CancelOutcome.ENDED
    assert await cancel(request.request_id, CancelReason.API, "a") is CancelOutcome.OVER
    assert await cancel(world.request().request_id, CancelReason.API, "a") is CancelOutcome.UNKNOWN
    assert len(await world.log(request.request_id)) == 2
    await world.assert_queues_clean()


async def test_a_running_request_is_ended_by_its_owner(world: World) -> None:
    worker = await world.worker("w1")
    request = await world.submit_new()
    owned = await worker.claim_one()
    assert (await worker.append(owned, 1, started(1))).cancel is None
    for _ in range(2):
        outcome = await world.submission.cancel(request.request_id, CancelReason.CLIENT_DISCONNECTED, "edge-a")
        assert outcome is CancelOutcome.ASKED
    assert await worker.ownership.read_inbox() == [
        Cancel(request_id=request.request_id, reason=CancelReason.CLIENT_DISCONNECTED, by="edge-a")
    ]
    outcome_of_append = await worker.append(owned, 2, tokens(1, 1))
    assert outcome_of_append.cancel is CancelReason.CLIENT_DISCONNECTED
    assert (await world.reading.status(request.request_id)).phase is RequestPhase.RUNNING
    await worker.append(owned, 3, ended(1, cancelled=outcome_of_append.cancel), is_final=True)
    assert await world.submission.cancel(request.request_id, CancelReason.API, "a") is CancelOutcome.OVER
    await world.assert_queues_clean()


async def test_the_end_of_a_queued_request_is_pushed(world: World) -> None:
    request = await world.submit_new(edge="edge-b")
    async with FrameBus(world.client, "edge-b") as bus:
        signals = aiter(bus)
        assert await anext(signals) == Resubscribed()
        await world.submission.cancel(request.request_id, CancelReason.API, "edge-a")
        frames = await anext(signals)
        assert isinstance(frames, tuple)
        assert [frame.n for frame in frames] == [1, 2]
        assert isinstance(decode_output(frames[-1].payload), Ended)


async def test_a_handed_over_request_is_cancelled_with_what_it_has_produced(world: World) -> None:
    worker = await world.worker("w1")
    request = world.request(n=2)
    await world.submit(request)
    owned = await worker.claim_one()
    done = ChoiceFinished(epoch=1, t=1.0, choice=0, finish_reason=FinishReason.STOP)
    await worker.append(owned, 1, started(1), tokens(1, 5), done, tokens(1, 6, 7, choice=1))
    await worker.ownership.release(request.request_id)
    assert await world.submission.cancel(request.request_id, CancelReason.ORPHANED, "a") is CancelOutcome.ENDED
    state = fold(await world.log(request.request_id))
    assert state.choice(0).finish_reason is FinishReason.STOP
    assert state.choice(1).finish_reason is FinishReason.CANCELLED
    assert state.usage == Usage(prompt_tokens=3, completion_tokens=3)
    await world.assert_queues_clean()


async def test_a_cancel_that_meets_a_claim_ends_or_asks_but_never_both(world: World) -> None:
    worker = await world.worker("w1")
    for _ in range(10):
        request = await world.submit_new()
        claimed, outcome = await asyncio.gather(
            worker.ownership.claim(1),
            world.submission.cancel(request.request_id, CancelReason.API, "a"),
        )
        log = await world.log(request.request_id)
        if outcome is CancelOutcome.ENDED:
            assert claimed == []
            assert fold(log).is_terminal
        else:
            assert outcome is CancelOutcome.ASKED
            (owned,) = claimed
            assert (await worker.append(owned, 1, started(1))).cancel is CancelReason.API
            await worker.append(owned, 2, ended(1, cancelled=CancelReason.API), is_final=True)
    await world.assert_queues_clean()
