"""Models, blobs, workers and queue figures."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from common.errors import ConfigError, LogCorrupt, StreamExpired
from common.events import Drain, encode
from common.model_card import ModelCard
from common.transport.client import GroupMissing, LogClient
from common.transport.keys import BACKLOGGED, GROUP, QueueClass
from common.transport.records import QueueStats, RegisteredModel, WorkerRecord

_FORGET_WORKER_S = 3600.0
_INBOX_LENGTH = 1000
_INBOX_LIFE_S = 3600

_encoder = msgspec.msgpack.Encoder()
_card_decoder = msgspec.msgpack.Decoder(ModelCard)
_worker_decoder = msgspec.msgpack.Decoder(WorkerRecord)


class Registry:
    """What workers publish about themselves and edges read. All methods raise `LogUnavailable`."""

    def __init__(self, client: LogClient) -> None:
        self._client = client
        self._own: dict[str, WorkerRecord] = {}

    async def register(self, worker: str, card: ModelCard, blobs: Mapping[str, bytes]) -> None:
        """Publish a worker and its model; ``blobs`` by SHA-256. Idempotent.

        Raises `ConfigError` when live workers serve the same name with other weights, or a blob is too large;
        `ValueError` when a blob is not what its name says.
        """
        await self._refuse_other_weights(worker, card)
        for sha256, content in blobs.items():
            await self._put_blob(sha256, content)
        now = time.time()
        record = WorkerRecord(
            worker=worker,
            model=card.name,
            weights_fingerprint=card.weights_fingerprint,
            started_s=now,
            seen_s=now,
        )
        self._own[worker] = record
        keys = self._client.keys
        await self._client.command("HSET", keys.models, card.name, _encoder.encode(card), key=keys.models)
        await self._put_worker(record)
        await self._forget_old_workers(now)

    async def report(self, worker: str, stats: Mapping[str, float]) -> None:
        """Refresh the worker's figures (and its record, should the server have lost it).

        Raises `KeyError` when this registry has not registered the worker.
        """
        record = msgspec.structs.replace(self._own[worker], seen_s=time.time(), stats=dict(stats))
        self._own[worker] = record
        await self._put_worker(record)

    async def unregister(self, worker: str) -> None:
        """Remove a worker that stops in order. Safe to repeat."""
        self._own.pop(worker, None)
        keys = self._client.keys
        await self._client.command("HDEL", keys.workers, worker, key=keys.workers)

    async def models(self) -> list[RegisteredModel]:
        """Every model ever registered, with the workers whose lease holds now, by name.

        Raises `LogCorrupt` for a card that cannot be understood.
        """
        workers = [record for record in await self.workers() if record.is_live]
        keys = self._client.keys
        cards = [_decoded(_card_decoder, value) for value in (await self._fields(keys.models)).values()]
        return [
            RegisteredModel(card, tuple(record.worker for record in workers if record.model == card.name))
            for card in sorted(cards, key=lambda card: card.name)
        ]

    async def blob(self, sha256: str) -> bytes:
        """Content by its hash. Raises `StreamExpired` when there is none, `LogCorrupt` when it does not match."""
        key = self._client.keys.blob(sha256)
        content = await self._client.command("GET", key, key=key)
        if content is None:
            raise StreamExpired(f"blob {sha256} is not in the log")
        if hashlib.sha256(content).hexdigest() != sha256:
            raise LogCorrupt(f"blob {sha256} has other content")
        return bytes(content)

    async def workers(self) -> list[WorkerRecord]:
        """Every registered worker, live or not, by name."""
        records: list[WorkerRecord] = [
            _decoded(_worker_decoder, value) for value in (await self._fields(self._client.keys.workers)).values()
        ]
        live = await asyncio.gather(*(self._is_live(record.worker) for record in records))
        marked = [msgspec.structs.replace(r, is_live=is_live) for r, is_live in zip(records, live, strict=True)]
        return sorted(marked, key=lambda record: record.worker)

    async def drain(self, worker: str, *, handover: bool) -> None:
        """Tell a worker to take nothing new; with ``handover`` to release what it runs."""
        key = self._client.keys.inbox(0, worker)
        await self._client.command(
            "XADD", key, "MAXLEN", "~", _INBOX_LENGTH, "*", "d", encode(Drain(handover=handover)), key=key
        )
        await self._client.command("EXPIRE", key, _INBOX_LIFE_S, key=key)

    async def queue_stats(self, model: str) -> QueueStats:
        """Depth, admitted tokens and drain rate of one model."""
        partitions = range(self._client.keys.partitions)
        parts = await asyncio.gather(*(self._partition_stats(model, partition) for partition in partitions))
        return QueueStats(
            model=model,
            depth=sum(part.depth for part in parts),
            running=sum(part.running for part in parts),
            tokens=sum(part.tokens for part in parts),
            drain_rate=sum(part.drain_rate for part in parts),
            depth_by_class={
                c.name.lower(): sum(part.depth_by_class[c.name.lower()] for part in parts) for c in QueueClass
            },
            dead_letters=sum(part.dead_letters for part in parts),
        )

    async def _partition_stats(self, model: str, partition: int) -> QueueStats:
        keys, command = self._client.keys, self._client.command
        depths: dict[str, int] = {}
        running = 0
        for queue_class in QueueClass:
            queue = keys.queue(partition, model, queue_class)
            depths[queue_class.name.lower()] = await command("XLEN", queue, key=queue)
            running += await self._pending(queue)
            if queue_class in BACKLOGGED:
                backlog = keys.backlog(partition, model, queue_class)
                depths[queue_class.name.lower()] += await command("ZCARD", backlog, key=backlog)
        load = await self._fields(keys.load(partition, model))
        dead_letters = keys.dead_letters(partition, model)
        return QueueStats(
            model=model,
            depth=sum(depths.values()),
            running=running,
            tokens=max(sum(int(v) for k, v in load.items() if k.startswith(b"tokens:")), 0),
            drain_rate=float(load.get(b"rate", 0)),
            depth_by_class=depths,
            dead_letters=await command("XLEN", dead_letters, key=dead_letters),
        )

    async def _pending(self, queue: str) -> int:
        try:
            summary = await self._client.command("XPENDING", queue, GROUP, key=queue)
        except GroupMissing:  # no worker has been here yet
            return 0
        return int(summary["pending"] if isinstance(summary, dict) else summary[0])

    async def _refuse_other_weights(self, worker: str, card: ModelCard) -> None:
        for record in await self.workers():
            is_other = record.model == card.name and record.weights_fingerprint != card.weights_fingerprint
            if is_other and record.is_live and record.worker != worker:
                raise ConfigError(
                    f"model {card.name!r} is served by worker {record.worker} with other weights "
                    f"or in another format ({record.weights_fingerprint[:12]}, here {card.weights_fingerprint[:12]}): "
                    "requests could not move between them; give both the same model, --dtype, --quantization, "
                    "--kv-cache-dtype and kernels, or this one another --served-model-name"
                )

    async def _put_blob(self, sha256: str, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != sha256:
            raise ValueError(f"blob {sha256} has other content")
        limit = self._client.settings.max_blob_bytes
        if len(content) > limit:
            raise ConfigError(f"max_blob_bytes: a blob has {len(content)} bytes, at most {limit} are allowed")
        key = self._client.keys.blob(sha256)
        if not await self._client.command("EXISTS", key, key=key):
            await self._client.command("SET", key, content, key=key)

    async def _put_worker(self, record: WorkerRecord) -> None:
        keys = self._client.keys
        await self._client.command("HSET", keys.workers, record.worker, _encoder.encode(record), key=keys.workers)

    async def _forget_old_workers(self, now: float) -> None:
        for record in await self.workers():
            if not record.is_live and now - record.seen_s > _FORGET_WORKER_S:
                await self.unregister(record.worker)

    async def _is_live(self, worker: str) -> bool:
        key = self._client.keys.lease(0, worker)
        return bool(await self._client.command("EXISTS", key, key=key))

    async def _fields(self, key: str) -> dict[bytes, bytes]:
        reply = await self._client.command("HGETALL", key, key=key)
        return reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))


def _decoded(decoder: msgspec.msgpack.Decoder[Any], payload: bytes) -> Any:
    try:
        return decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise LogCorrupt(f"a record of the registry cannot be understood: {error}") from error
