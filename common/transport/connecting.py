"""The redis library, met in one place: clients of each kind for a configured address.

Library retries are off everywhere: they repeat commands that must not be repeated, and go back to the old address
after a failover. `protocol=2` keeps maintenance notifications (and a broken stale-connection check) out of the way.
"""

from __future__ import annotations

from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode as SyncClusterNode
from redis.cluster import RedisCluster as SyncRedisCluster
from redis.retry import Retry as SyncRetry
from redis.sentinel import Sentinel as SyncSentinel

from common.errors import ConfigError
from common.transport.addresses import parse_address
from common.transport.cluster import ClusterConnections
from common.transport.connections import Client, Connections, common_options
from common.transport.failures import TRANSIENT, translated
from common.transport.settings import RedisSettings
from common.transport.single import SingleConnections, sentinels_of


def connect(settings: RedisSettings) -> Connections:
    """The clients for the configured address. Nothing is connected yet. Raises `ConfigError`."""
    address = parse_address(settings.redis_url)
    if address.kind == "cluster":
        return ClusterConnections(address, settings)
    return SingleConnections(address, settings)


def connect_sync(settings: RedisSettings, timeout_s: float) -> Client:
    """A synchronous client (it has ``execute_command`` and ``close``), for the one thread that renews a lease."""
    address = parse_address(settings.redis_url)
    options = common_options(settings, timeout_s) | {"socket_connect_timeout": timeout_s}
    retry = SyncRetry(NoBackoff(), 0)
    credentials: dict[str, Any] = {"username": address.username, "password": address.password, "ssl": address.has_tls}
    try:
        if address.kind == "cluster":
            nodes = [SyncClusterNode(host, port) for host, port in address.hosts]  # type: ignore[no-untyped-call]
            return SyncRedisCluster(startup_nodes=nodes, retry=retry, **credentials, **options)
        if address.kind == "sentinel":
            sentinel: Any = SyncSentinel(address.hosts, sentinel_kwargs=options)  # type: ignore[no-untyped-call]
            return sentinel.master_for(address.service, db=address.db, retry=retry, **credentials, **options)
        return redis.Redis.from_url(address.url, retry=retry, **options)
    except ValueError as error:
        raise ConfigError(f"redis_url: {error}", param="redis_url") from error
    except TRANSIENT as error:  # a cluster client connects when it is built
        raise translated(error) from error


def close_sync(client: Client) -> None:
    """Close what `connect_sync` made."""
    client.close()
    if not isinstance(client, SyncRedisCluster):
        for sentinel in sentinels_of(client):
            sentinel.close()
