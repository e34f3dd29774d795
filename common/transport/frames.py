"""Pushing frames: one message per edge (and partition in a cluster), after the events are in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from common.errors import LogCorrupt, LogUnavailable
from common.transport.client import LogClient
from common.transport.failures import TRANSIENT, RedisError
from common.transport.records import Frame

_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Frame, ...])


def decode_frames(message: bytes) -> tuple[Frame, ...]:
    """Raises `LogCorrupt`."""
    try:
        return _decoder.decode(message)
    except msgspec.DecodeError as error:
        raise LogCorrupt(f"not a message of frames: {error}") from error


def channel(client: LogClient, edge_id: str, partition: int) -> str:
    """Where an edge hears of a partition's requests: channels follow the slots in a cluster, else one is enough."""
    return client.keys.bus(partition if client.connections.is_cluster else 0, edge_id)


def channels(client: LogClient, edge_id: str) -> list[str]:
    """All channels of an edge."""
    return sorted({channel(client, edge_id, partition) for partition in range(client.keys.partitions)})


async def publish(client: LogClient, routed: Iterable[tuple[bytes, list[Frame]]]) -> None:
    """Push frames of requests to the edges named with them (comma-separated, as the request hash has them).

    Never fails: a lost frame costs its readers a delay, they find the event in the log.
    """
    by_channel: dict[str, list[Frame]] = {}
    for edges, frames in routed:
        for edge_id in edges.decode().split(",") if edges else ():
            for frame in frames:
                name = channel(client, edge_id, client.keys.partition(frame.request_id))
                by_channel.setdefault(name, []).append(frame)
    command = "SPUBLISH" if client.connections.is_cluster else "PUBLISH"
    for name, frames in by_channel.items():
        try:
            await client.connections.execute(command, name, _encoder.encode(frames), key=name)
        except (*TRANSIENT, RedisError, LogUnavailable) as error:
            _log.debug("frames for %s were not pushed: %s", name, error)
