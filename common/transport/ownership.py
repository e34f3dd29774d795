"""What workers do with requests: claim, own, append, take over, hand over.

Order of effects: an entry becomes pending with this worker (claim, takeover), then the request is owned under a new
epoch, then its log is read, then it is remembered as held and handed out. Whatever is interrupted on the way is still
pending, and the next look at the history starts it again under a newer epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from common.errors import HeadraceError, LogCorrupt, LogUnavailable
from common.events import CancelReason, Failed, InboxEvent, decode_request
from common.transport import scripts
from common.transport.absence import DeathWatch
from common.transport.appending import CHUNK, Batch, batches
from common.transport.client import LogClient
from common.transport.frames import publish
from common.transport.inbox import Inbox
from common.transport.keys import GROUP, QueueClass
from common.transport.leases import Lease
from common.transport.log import read_all
from common.transport.queues import Entry, Queues
from common.transport.records import AppendItem, AppendOutcome, AppendStatus, Frame, Owned

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_OWN_CHUNK: Final = 64
_RECHECK_S: Final = 3.0
_NO_LEASE_PAUSE_S: Final = 0.05
_NEVER_MS: Final = 1 << 40


class Ownership:
    """The requests of one worker and one model. All methods belong to one event loop.

    It remembers which requests it holds and under which epoch, so that nothing pending is overlooked or owned twice.
    """

    def __init__(self, client: LogClient, *, model: str, lease: Lease, max_attempts: int = 3) -> None:
        self._client = client
        self._model = model
        self._lease = lease
        self._max_attempts = max_attempts
        self._queues = Queues(client, model, lease)
        self._inbox = Inbox(client, lease.worker)
        self._held: dict[str, int] = {}
        self._owning = asyncio.Lock()  # what is held must not change between asking for an epoch and remembering it
        self._deaths = DeathWatch(client, self._queues, lease)
        self._generation = client.generation
        self._recheck_at = time.monotonic()  # a reused worker name may have a history already
        self._trouble_at = -math.inf  # when the log last failed us: edges could not say either that they read
        self._num_lapses = lease.num_lapses

    @property
    def held(self) -> dict[str, int]:
        """Request id to epoch of everything owned and not yet ended, fenced or released."""
        return dict(self._held)

    async def ensure_groups(self) -> None:
        """Create the consumer groups. To be called once at start; repeated by itself when they vanish."""
        await self._queues.ensure_groups()

    async def claim(self, limit: int, block_ms: int = 0) -> list[Owned]:
        """Take up to ``limit`` requests and own them; wait up to ``block_ms`` when there is none.

        After a reconnection, and every few seconds anyway, it also rechecks its history, so it may return requests
        with ``limit`` 0, and again a request that the worker believes to run (under a new epoch: replace it).
        Returns nothing while the lease is not held. A request that cannot be decoded is failed in the log, not raised.

        Raises `LogUnavailable`.
        """
        with self._delivering() as owned:
            if self._client.generation != self._generation or time.monotonic() >= self._recheck_at:
                await self._recheck(owned)
            if limit > len(owned):
                await self._claim_new(owned, limit - len(owned), 0 if owned else block_ms)
        return owned

    async def claim_urgent(self, limit: int) -> list[Owned]:
        """Take up to ``limit`` requests of the highest priority class alone, without waiting.

        Raises `LogUnavailable`.
        """
        with self._delivering() as owned:
            await self._own(await self._queues.read_new(limit, (QueueClass.HIGH,)) or [], owned)
        return owned

    async def recheck_history(self) -> list[Owned]:
        """Own what is pending with this worker but not held by it (the reply that named it was lost).

        Raises `LogUnavailable`.
        """
        with self._delivering() as owned:
            await self._recheck(owned)
        return owned

    async def takeover_scan(self, limit: int) -> list[Owned]:
        """Take up to ``limit`` requests from workers whose leases are gone. Call it `LOOKS_PER_TTL` times a lease.

        A lease counts as gone when it was seen absent twice, without a failure in between: see `DeathWatch`.

        Raises `LogUnavailable`.
        """
        with self._delivering() as owned:
            for partition, dead in await self._deaths.look():
                if len(owned) < limit:
                    taken = await self._queues.take(partition, dead, limit - len(owned))
                    if taken:
                        _log.warning("taking over %d requests of worker %s", len(taken), dead)
                    await self._own(taken, owned)
        return owned

    async def append(self, items: Sequence[AppendItem]) -> list[AppendOutcome]:
        """Append what one engine step produced, and push frames to the edges that read these requests; of a large
        step what is in the log already, while the rest is being appended.

        Where one call of the script is enough it pushes, too, so that readers do not wait for its answer to come here
        and for what is pushed to go back. Not in a cluster, and not where an event counts only once replicas have it.

        Answers in the order of ``items``. Safe to repeat with the same items, which is what to do after
        `LogUnavailable` (any part may have been appended).
        """
        calls = batches(items, self._client.keys)
        can_script_push = not (self._client.connections.is_cluster or self._client.waits_for_replicas)
        pushing = None if can_script_push and len(calls) == 1 else _Pushing(self._client)
        replies = await _answers([self._append(batch, pushing) for batch in calls])
        if pushing is not None:
            await pushing.rest()
        outcomes: dict[int, AppendOutcome] = {}
        for batch, reply in zip(calls, replies, strict=True):
            if not isinstance(reply, BaseException):
                outcomes.update(zip(batch.indexes, reply, strict=True))
        for index, outcome in outcomes.items():
            self._settle(items[index], outcome)
        for reply in replies:
            if isinstance(reply, BaseException):
                self._trouble_at = time.monotonic()
                raise reply
        return [outcomes[index] for index in range(len(items))]

    async def release(self, request_id: str) -> bool:
        """Hand a request back, in front of the queue, for another worker. False when it was not ours any more.

        Raises `LogUnavailable`.
        """
        epoch = self._held.get(request_id)
        if epoch is None:
            return False
        keys = self._client.keys
        queues = keys.queues(keys.partition(request_id), self._model)
        arguments = [GROUP, self._lease.worker, epoch, request_id]
        reply = await self._client.run(scripts.RELEASE, [keys.request(request_id), *queues], arguments)
        self._held.pop(request_id, None)
        return bool(reply)

    async def forgive(self, held: Mapping[str, int]) -> None:
        """Of these requests, with the epochs under which they were held here, some were taken over although this worker
        was only slow: those takeovers do not count against them. Safe to repeat.

        Raises `LogUnavailable`.
        """
        for request_id, epoch in held.items():
            key = self._client.keys.request(request_id)
            await self._client.run(scripts.FORGIVE, [key], [self._lease.worker, epoch])

    async def read_inbox(self, block_ms: int = 0) -> list[InboxEvent]:
        """New cancellations and drains, waiting up to ``block_ms`` for the first.

        Raises `LogUnavailable`; nothing is lost, ask again.
        """
        return await self._inbox.read(block_ms)

    @contextlib.contextmanager
    def _delivering(self) -> Iterator[list[Owned]]:
        """Collects what the caller gets. A failure after the first success is left to the next call.

        What cannot be handed out is not held, so that the history shows it again.
        """
        owned: list[Owned] = []
        try:
            yield owned
        except LogUnavailable:
            self._trouble_at = time.monotonic()
            if not owned:
                raise
        except BaseException:
            for item in owned:
                self._held.pop(item.request.request_id, None)
            self._recheck_at = time.monotonic()
            raise

    async def _recheck(self, owned: list[Owned]) -> None:
        generation = self._client.generation
        await self._own(await self._queues.read_history(), owned)
        self._generation, self._recheck_at = generation, time.monotonic() + _RECHECK_S

    async def _claim_new(self, owned: list[Owned], count: int, block_ms: int) -> None:
        entries = await self._queues.read_new(count)
        if entries is None:
            await asyncio.sleep(min(_NO_LEASE_PAUSE_S, block_ms / 1000))
            return
        if not entries and block_ms:
            entries = await self._queues.wait_new(count, block_ms)
        await self._own(entries, owned)

    async def _own(self, entries: Sequence[Entry], owned: list[Owned]) -> None:
        by_partition: dict[int, list[Entry]] = {}
        for entry in entries:
            by_partition.setdefault(entry.partition, []).append(entry)
        for partition, group in by_partition.items():
            for start in range(0, len(group), _OWN_CHUNK):
                async with self._owning:
                    await self._own_chunk(partition, group[start : start + _OWN_CHUNK], owned)

    async def _own_chunk(self, partition: int, entries: Sequence[Entry], owned: list[Owned]) -> None:
        keys, lease, settings = self._client.keys, self._lease, self._client.settings
        names = [
            keys.lease(partition, lease.worker),
            keys.load(partition, self._model),
            keys.dead_letters(partition, self._model),
            *keys.queues(partition, self._model),
            *keys.backlogs(partition, self._model),
        ]
        arguments: list[Any] = [GROUP, lease.worker, lease.token, self._max_attempts, settings.retention_s]
        arguments.append(self._reader_timeout_ms())
        for entry in entries:
            names += (keys.request(entry.request_id), keys.output(entry.request_id))
            known = self._held.get(entry.request_id, "")
            arguments += (int(entry.queue_class), entry.entry_id, entry.request_id, known)
        replies = await self._client.run(scripts.OWN, names, arguments, is_durable=True)
        if replies is None:  # the lease is not held: look again when it is
            self._recheck_at = time.monotonic()
            return
        for entry, reply in zip(entries, replies, strict=True):
            await self._take_up(entry.request_id, reply, owned)

    async def _take_up(self, request_id: str, reply: list[Any], owned: list[Owned]) -> None:
        """Act on one answer of the own script (its head explains them)."""
        match reply:
            case [0]:
                self._held.pop(request_id, None)
            case [2]:
                pass
            case [3, n, payload, edges]:
                self._held.pop(request_id, None)
                await publish(self._client, [(edges, [Frame(request_id, n, payload)])])
            case [1, epoch, length, spec, cancel, attempts, queued_ms, strikes]:
                try:
                    events = await read_all(self._client, request_id) if length else []
                    request = decode_request(spec)
                except LogCorrupt as error:
                    await self._give_up(request_id, epoch, length, error)
                    return
                reason = CancelReason(cancel.decode()) if cancel else None
                self._held[request_id] = epoch
                waited_s = max(queued_ms, 0) / 1000
                owned.append(Owned(request, epoch, len(events), tuple(events), reason, attempts, waited_s, strikes))
            case _:
                raise LogCorrupt(f"own answered {reply!r}")

    async def _give_up(self, request_id: str, epoch: int, length: int, error: LogCorrupt) -> None:
        """End a request that no reader of this version can continue."""
        _log.error("request %s cannot be understood: %s", request_id, error.message)
        failure = Failed(epoch=epoch, t=time.time(), code=error.code, message=error.message)
        await self.append([AppendItem(request_id, epoch, length + 1, (failure,), is_final=True)])

    async def _append(self, batch: Batch, pushing: _Pushing | None) -> list[AppendOutcome]:
        names = batch.keys(self._client.keys, self._model, self._lease.worker)
        arguments = batch.arguments(
            self._client.settings,
            self._client.keys,
            self._lease.token,
            self._reader_timeout_ms(),
            pushes=pushing is None,
        )
        reply = await self._client.run(scripts.APPEND, names, arguments, is_durable=True)
        outcomes = batch.outcomes(reply)
        if pushing is not None:
            await pushing.add(batch.frames(reply))
        return outcomes

    def _reader_timeout_ms(self) -> int:
        """After the log was away or full, or its clock has leapt past our lease, edges get their time to say that they
        read before a request counts as orphaned."""
        timeout_s = self._client.settings.reader_timeout_s
        if self._lease.num_lapses != self._num_lapses:
            self._num_lapses, self._trouble_at = self._lease.num_lapses, time.monotonic()
        is_in_doubt = time.monotonic() - self._trouble_at < timeout_s
        return _NEVER_MS if is_in_doubt else int(timeout_s * 1000)

    def _settle(self, item: AppendItem, outcome: AppendOutcome) -> None:
        is_over = item.is_final and outcome.status in (AppendStatus.APPENDED, AppendStatus.DUPLICATE)
        is_lost = outcome.status is AppendStatus.FENCED
        if (is_over or is_lost) and self._held.get(item.request_id) == item.epoch:
            del self._held[item.request_id]


async def _answers(calls: Sequence[Coroutine[Any, Any, _T]]) -> list[_T | BaseException]:
    """Results or failures of all calls. A single one, which is what most steps need, is not worth a task."""
    if len(calls) != 1:
        return await asyncio.gather(*calls, return_exceptions=True)
    try:
        return [await calls[0]]
    except HeadraceError as error:
        return [error]


class _Pushing:
    """Frames of one append, pushed together: a message costs worker, server and edge more than a frame does."""

    def __init__(self, client: LogClient) -> None:
        self._client = client
        self._waiting: list[tuple[bytes, list[Frame]]] = []

    async def add(self, routed: Iterable[tuple[bytes, list[Frame]]]) -> None:
        """Of requests whose events are in the log now."""
        self._waiting.extend(routed)
        if len(self._waiting) >= CHUNK:
            await self.rest()

    async def rest(self) -> None:
        routed, self._waiting = self._waiting, []
        if routed:
            await publish(self._client, routed)
