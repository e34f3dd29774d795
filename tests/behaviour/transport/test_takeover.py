"""When workers die, freeze and wake up again."""

from __future__ import annotations

import asyncio

import msgspec

from common.events import CancelReason, Failed, Milestone
from common.transport import AppendStatus, CancelOutcome, RequestPhase
from common.transport.absence import AbsenceWatch
from tests.behaviour.transport.world import MODEL, Clock, World, ended, started, tokens


async def test_a_successor_continues_at_the_next_event(world: World) -> None:
    dead, heir = await world.worker("w1"), await world.worker("w2")
    request = await world.submit_new()
    owned = await dead.claim_one()
    await dead.append(owned, 1, started(1), tokens(1, 4), tokens(1, 5))
    dead.die()
    (taken,) = await heir.ownership.takeover_scan(8)
    assert (taken.request, taken.epoch, taken.last_n, taken.attempts) == (request, 2, 3, 1)
    assert [item.event for item in taken.events] == [started(1), tokens(1, 4), tokens(1, 5)]
    outcome = await heir.append(taken, 4, started(2, 3), tokens(2, 6), ended(2), is_final=True)
    assert outcome.status is AppendStatus.APPENDED
    assert [item.n for item in await world.log(request.request_id)] == [1, 2, 3, 4, 5, 6]
    await world.assert_queues_clean()


async def test_a_zombie_cannot_append_release_or_steal_back(world: World) -> None:
    zombie, heir = await world.worker("w1"), await world.worker("w2")
    request = await world.submit_new()
    owned = await zombie.claim_one()
    await zombie.append(owned, 1, started(1))
    zombie.die()
    (taken,) = await heir.ownership.takeover_scan(8)
    zombie.lease.renew()  # it wakes up and believes to be alive
    assert (await zombie.append(owned, 2, tokens(1, 66))).status is AppendStatus.FENCED
    assert (await zombie.append(owned, 2, ended(1), is_final=True)).status is AppendStatus.FENCED
    assert zombie.ownership.held == {}
    zombie.ownership._held[request.request_id] = owned.epoch
    assert not await zombie.ownership.release(request.request_id)
    assert await zombie.ownership.recheck_history() == []
    await heir.append(taken, 2, started(2, 1), tokens(2, 7), ended(2), is_final=True)
    assert (await zombie.append(owned, 2, tokens(1, 66))).status is AppendStatus.FENCED
    assert [item.event for item in await world.log(request.request_id)][2] == tokens(2, 7)


async def test_a_request_that_comes_back_to_a_former_owner_is_owned_anew(world: World) -> None:
    """Its memory holds an old epoch: taken over, the taker died, and the entry is its own again."""
    first, second = await world.worker("w1"), await world.worker("w2")
    await world.submit_new()
    await first.claim_one()
    first.die()
    (taken,) = await second.ownership.takeover_scan(8)
    first.lease.renew()
    second.die()
    (back,) = await first.ownership.takeover_scan(8)
    assert (taken.epoch, back.epoch, back.attempts) == (2, 3, 2)
    assert first.ownership.held == {back.request.request_id: 3}
    await first.finish(back)


async def test_a_takeover_from_a_worker_that_was_only_slow_is_forgiven_once(world: World) -> None:
    slow, heir = await world.worker("w1"), await world.worker("w2")
    request, kept = await world.submit_new(), await world.submit_new()
    owned = await slow.ownership.claim(2)
    held = slow.ownership.held
    slow.die()
    await heir.ownership.takeover_scan(1)
    slow.lease.renew()
    await slow.ownership.forgive(held)
    await slow.ownership.forgive(held)
    for one in (request, kept):
        assert (await world.reading.status(one.request_id)).attempts == 0
    heir.die()
    (back,) = await slow.ownership.takeover_scan(8)
    assert (back.attempts, back.strikes) == (1, 1), "as after a first death"
    await slow.finish(back)
    for one in owned:
        if one.request != back.request:
            await slow.finish(one)
    await world.assert_queues_clean()


async def test_a_live_worker_is_left_alone(world: World) -> None:
    owner, other = await world.worker("w1"), await world.worker("w2")
    await world.submit_new()
    owned = await owner.claim_one()
    for _ in range(3):
        assert await other.ownership.takeover_scan(8) == []
    await owner.finish(owned)


async def test_a_lease_must_be_seen_absent_twice(world: World, clock: Clock) -> None:
    owner, other = await world.worker("w1"), await world.worker("w2", look_s=1.0)
    await world.submit_new()
    await owner.claim_one()
    owner.die()
    assert await other.ownership.takeover_scan(8) == []
    clock.now += 0.9
    assert await other.ownership.takeover_scan(8) == []  # too early for the second look
    owner.lease.renew()  # as after an outage of the server: it was alive all the time
    clock.now += 0.2
    assert await other.ownership.takeover_scan(8) == []
    owner.die()
    assert await other.ownership.takeover_scan(8) == []  # counts from here again
    clock.now += 0.9
    assert await other.ownership.takeover_scan(8) == []
    clock.now += 0.2
    assert len(await other.ownership.takeover_scan(8)) == 1


async def test_an_outage_between_the_looks_starts_the_wait_again(world: World) -> None:
    watch: AbsenceWatch[str] = AbsenceWatch()
    assert watch.look({"a", "b"}, 10.0, 1.5) == []
    assert watch.look({"a"}, 11.0, 1.5) == []
    assert watch.look({"a", "b"}, 11.5, 1.5) == ["a"]
    watch.forget()
    assert watch.look({"a"}, 11.6, 1.5) == []
    assert watch.look({"a"}, 13.1, 1.5) == ["a"]


async def test_a_server_that_stood_still_makes_the_heir_wait_longer(world: World, clock: Clock) -> None:
    owner, heir = await world.worker("w1"), await world.worker("w2", look_s=0.25)
    await world.submit_new()
    await owner.claim_one()
    deaths = heir.ownership._deaths
    deaths._doubt()
    owner.die()
    assert await heir.ownership.takeover_scan(8) == []
    clock.now += 0.3
    assert await heir.ownership.takeover_scan(8) == []  # enough without a doubt
    clock.now += 0.3
    assert len(await heir.ownership.takeover_scan(8)) == 1


async def test_who_has_lost_its_own_lease_does_not_judge_others(world: World, clock: Clock) -> None:
    owner, heir = await world.worker("w1"), await world.worker("w2", look_s=0.1)
    await world.submit_new()
    await owner.claim_one()
    owner.die()  # all leases are gone, as when the server takes no writes
    heir.die()
    for _ in range(3):
        assert await heir.ownership.takeover_scan(8) == []
        clock.now += 0.1
    heir.lease.renew()  # it does again, and the heir is the first to write
    assert await heir.ownership.takeover_scan(8) == []
    owner.lease.renew()
    clock.now += 0.25
    assert await heir.ownership.takeover_scan(8) == []


async def test_a_dying_lease_is_enough_without_release(world: World) -> None:
    owner, other = await world.worker("w1"), await world.worker("w2", look_s=0.05)
    await world.submit_new()
    await owner.claim_one()
    owner.lease.ttl_s = 0.5
    owner.lease.renew()
    async with asyncio.timeout(60):
        while not (taken := await other.ownership.takeover_scan(8)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert len(taken) == 1


async def test_takeover_respects_the_limit_and_then_forgets_the_dead(world: World) -> None:
    dead, heir = await world.worker("w1"), await world.worker("w2")
    for k in range(5):
        await world.submit(world.request(request_id=f"0-018f0000-0000-7000-8000-{k:012x}"))
    assert len(await dead.ownership.claim(5)) == 5
    dead.die()
    assert len(await heir.ownership.takeover_scan(2)) == 2
    assert await heir.ownership.takeover_scan(0) == []
    assert len(await heir.ownership.takeover_scan(9)) == 3
    await heir.ownership.takeover_scan(9)
    assert await heir.ownership._queues.other_consumers() == set()
    assert len(heir.ownership.held) == 5


async def test_two_heirs_never_own_the_same_request(world: World) -> None:
    dead, one, two = await world.worker("w1"), await world.worker("w2"), await world.worker("w3")
    for _ in range(12):
        await world.submit_new()
    while len(dead.ownership.held) < 12:
        await dead.ownership.claim(12)
    dead.die()
    results = await asyncio.gather(*(worker.ownership.takeover_scan(12) for worker in (one, two) for _ in range(3)))
    taken = [owned.request.request_id for result in results for owned in result]
    assert len(taken) == len(set(taken)) == 12


async def test_a_heir_without_a_lease_takes_nothing(world: World) -> None:
    dead, heir = await world.worker("w1"), await world.worker("w2")
    await world.submit_new()
    await dead.claim_one()
    dead.die()
    heir.die()
    assert await heir.ownership.takeover_scan(8) == []
    heir.lease.renew()
    assert len(await heir.ownership.takeover_scan(8)) == 1


async def test_a_heir_that_dies_before_it_owns_loses_nothing(world: World) -> None:
    dead, brief, heir = await world.worker("w1"), await world.worker("w2"), await world.worker("w3")
    request = await world.submit_new()
    await dead.claim_one()
    dead.die()
    for partition, name in await brief.ownership._deaths.look():
        await brief.ownership._queues.take(partition, name, 8)
    brief.die()
    (taken,) = await heir.ownership.takeover_scan(8)
    assert (taken.request, taken.epoch, taken.attempts) == (request, 2, 1)


async def test_a_request_that_kills_its_workers_is_quarantined(world: World) -> None:
    request = await world.submit_new()
    first = await world.worker("w0", max_attempts=2)
    await first.claim_one()
    first.die()
    for k in (1, 2):
        heir = await world.worker(f"w{k}", max_attempts=2)
        (taken,) = await heir.ownership.takeover_scan(8)
        assert taken.attempts == k
        heir.die()
    last = await world.worker("w9", max_attempts=2)
    assert await last.ownership.takeover_scan(8) == []
    (recorded,) = await world.log(request.request_id)
    assert isinstance(recorded.event, Failed)
    assert (recorded.event.code, recorded.event.epoch) == ("quarantined", 4)
    assert (await world.reading.status(request.request_id)).phase is RequestPhase.DONE
    await world.assert_queues_clean()
    assert (await world.registry.queue_stats(MODEL)).dead_letters == 1
    key = world.client.keys.dead_letters(world.client.keys.partition(request.request_id), MODEL)
    ((_, fields),) = await world.raw("XRANGE", key, "-", "+", key=key)
    assert fields[b"rid"].decode() == request.request_id
    assert fields[b"reason"] == b"quarantined"


async def test_strikes_count_only_the_workers_that_brought_a_request_no_further(world: World) -> None:
    await world.submit_new()
    owner = await world.worker("w0")
    owned = await owner.claim_one()
    expected = [
        (tokens(1), 0),  # it got on: nobody is blamed
        (Milestone(epoch=1, t=1.0, what="prefill_chunk"), 1),
        (started(1), 2),
        (Milestone(epoch=1, t=1.0, what="held_back"), 2),  # it waited for its turn: it cannot have been the one
        (started(1), 3),
        (tokens(1), 0),
    ]
    for k, (event, strikes) in enumerate(expected, start=1):
        await owner.append(owned, k, msgspec.structs.replace(event, epoch=owned.epoch))
        owner.die()
        owner = await world.worker(f"w{k}")
        (owned,) = await owner.ownership.takeover_scan(8)
        assert (owned.attempts, owned.strikes) == (k, strikes), event


async def test_a_request_that_always_gets_a_little_further_before_it_kills_is_stopped_too(world: World) -> None:
    request = await world.submit_new()
    owner = await world.worker("w0", max_attempts=1)
    owned = await owner.claim_one()
    for k in range(1, 12):
        await owner.append(owned, k, msgspec.structs.replace(tokens(1), epoch=owned.epoch))
        owner.die()
        owner = await world.worker(f"w{k}", max_attempts=1)
        taken = await owner.ownership.takeover_scan(8)
        if k <= 10:
            (owned,) = taken
    assert taken == []
    last = (await world.log(request.request_id))[-1].event
    assert isinstance(last, Failed)
    assert last.code == "quarantined"


async def test_a_cancel_survives_the_death_of_the_owner(world: World) -> None:
    dead, heir = await world.worker("w1"), await world.worker("w2")
    request = await world.submit_new()
    await dead.append(await dead.claim_one(), 1, started(1))
    assert await world.submission.cancel(request.request_id, CancelReason.API, "edge-a") is CancelOutcome.ASKED
    dead.die()
    (taken,) = await heir.ownership.takeover_scan(8)
    assert taken.cancel is CancelReason.API
    await heir.append(taken, 2, started(2, 1), ended(2, cancelled=CancelReason.API), is_final=True)
    await world.assert_queues_clean()


async def test_a_clock_that_leaps_makes_no_reader_silent(world: World) -> None:
    """As after a machine has slept: leases have run out, and the last signs of readers are old."""
    request = await world.submit_new()
    worker = await world.worker("w1")
    owned = await worker.claim_one()
    key, lease = world.client.keys.request(request.request_id), world.client.keys.lease
    await world.raw("HINCRBY", key, "seen", -3_600_000, key=key)
    for partition in range(world.client.keys.partitions):
        await world.raw("DEL", lease(partition, "w1"), key=lease(partition, "w1"))
    assert (await worker.append(owned, 1, started(owned.epoch))).cancel is None
    worker.lease.renew()
    assert (await worker.append(owned, 2, tokens(owned.epoch, 1))).cancel is None
    assert worker.lease.num_lapses == 1


async def test_whose_own_lease_had_run_out_between_two_looks_waits_longer(world: World, clock: Clock) -> None:
    """A clock that leaps ends all leases at once, and the first to come back must not judge the others."""
    owner, heir = await world.worker("w1"), await world.worker("w2", look_s=0.2)
    await world.submit_new()
    await owner.claim_one()
    assert await heir.ownership.takeover_scan(8) == []
    for worker in (owner, heir):
        for partition in range(world.client.keys.partitions):
            key = world.client.keys.lease(partition, worker.name)
            await world.raw("DEL", key, key=key)
    heir.lease.renew()
    assert await heir.ownership.takeover_scan(8) == []
    clock.now += 0.25
    assert await heir.ownership.takeover_scan(8) == []
    owner.lease.renew()
    clock.now += 0.25
    assert await heir.ownership.takeover_scan(8) == []
