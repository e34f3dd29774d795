"""What a server must be, and what all processes of a deployment must agree on."""

from __future__ import annotations

import logging
from typing import Any, Final

from common.errors import ConfigError
from common.transport.connections import Connections
from common.transport.failures import ResponseError
from common.transport.keys import Keys
from common.transport.settings import RedisSettings

_log = logging.getLogger(__name__)
_OLDEST_SERVER: Final = (7, 0)
_CLUSTER_PARTITIONS: Final = 16


async def check_server(connections: Connections, settings: RedisSettings) -> None:
    """Raises `ConfigError` when a primary is too old, may evict requests, or is less durable than asked for."""
    for facts in await connections.on_primaries("INFO"):
        version = str(facts.get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_SERVER:
            raise ConfigError(f"redis_url: the server is version {version}, at least 7.0 is needed", param="redis_url")
        policy = str(facts.get("maxmemory_policy", "noeviction"))
        if int(facts.get("maxmemory", 0)) > 0 and policy != "noeviction":
            raise ConfigError(
                f"redis_url: maxmemory-policy is {policy}; it must be noeviction, or live requests are evicted",
                param="redis_url",
            )
        if settings.durability == "strict" and settings.strict_replicas == 0 and not int(facts.get("aof_enabled", 0)):
            raise ConfigError("durability: strict needs strict_replicas or a server with appendonly yes")
    if settings.durability == "strict" and settings.strict_replicas == 0:
        await _check_fsync(connections)


async def _check_fsync(connections: Connections) -> None:
    try:
        answers = await connections.on_primaries("CONFIG", "GET", "appendfsync")
    except ResponseError:  # managed services do not answer CONFIG
        _log.warning("cannot verify that the server's appendfsync is always, which strict durability relies on")
        return
    for answer in answers:
        if _pairs(answer).get("appendfsync") != "always":
            raise ConfigError("durability: strict needs strict_replicas or a server with appendfsync always")


def _pairs(answer: Any) -> dict[str, str]:
    texts = [item.decode() for item in answer]
    return dict(zip(texts[::2], texts[1::2], strict=True))


async def agree_partitions(connections: Connections, keys: Keys, settings: RedisSettings) -> int:
    """The deployment's partition count; the first process to start fixes it.

    Raises `ConfigError` when the settings ask for another one.
    """
    wanted = settings.partitions
    # On one server a second partition buys nothing: it would cost a call more for each step, and tenants are weighed
    # against each other within a partition.
    first = wanted or (_CLUSTER_PARTITIONS if connections.is_cluster else 1)
    kept = None
    while kept is None:  # between the two the log may be emptied, or fail over to a replica without the key
        await connections.execute("SET", keys.layout, first, "NX", key=keys.layout)
        kept = await connections.execute("GET", keys.layout, key=keys.layout)
    fixed = int(kept)
    if wanted is not None and wanted != fixed:
        raise ConfigError(
            f"partitions: this deployment was started with {fixed} partitions, not {wanted}", param="partitions"
        )
    return fixed
