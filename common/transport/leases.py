"""A worker's sign of life: one key a partition, renewed from a thread of its own."""

from __future__ import annotations

import contextlib
import secrets
from typing import Any

from common.errors import Fenced
from common.transport.connecting import close_sync, connect_sync
from common.transport.failures import TRANSIENT, NoScriptError, RedisError, translated
from common.transport.keys import Keys
from common.transport.scripts import RENEW
from common.transport.settings import RedisSettings


class Lease:
    """The lease of one worker incarnation. Synchronous, for one thread; made by `LogClient.lease`.

    ``worker`` must be unique among live workers; ``token`` is drawn afresh for each incarnation.
    """

    def __init__(self, settings: RedisSettings, keys: Keys, worker: str, ttl_s: float) -> None:
        """Connects at the first renewal."""
        self.worker = worker
        self.token = secrets.token_hex(8)
        self.ttl_s = ttl_s
        self.num_lapses = 0
        """How often a renewal found that the lease had run out since the one before. May be read by any thread."""
        self._is_held = False
        self._settings = settings
        self._keys = [keys.lease(partition, worker) for partition in range(keys.partitions)]
        self._client: Any = None

    def renew(self) -> None:
        """Extend the lease in every partition by ``ttl_s``; call it every quarter of that.

        Raises `Fenced` when another incarnation holds the name (stop the worker), `LogUnavailable` when Redis cannot
        be reached (keep trying: an expired lease may be taken up again, epochs protect the requests).
        """
        self._set(max(int(self.ttl_s * 1000), 1))

    def release(self) -> None:
        """Give the lease up at once, so that others take over without waiting. Safe to repeat.

        Raises `LogUnavailable`; then it runs out by itself.
        """
        with contextlib.suppress(Fenced):
            self._set(0)

    def close(self) -> None:
        """Close the connections; does not release."""
        if self._client is not None:
            close_sync(self._client)
            self._client = None

    def _set(self, ttl_ms: int) -> None:
        try:
            if self._client is None:
                self._client = connect_sync(self._settings, max(self.ttl_s / 3, 0.1))
            replies = [self._call(key, ttl_ms) for key in self._keys]
        except (*TRANSIENT, RedisError) as error:
            self.close()  # a failover may have moved the primary: find it afresh
            raise translated(error) from error
        self.num_lapses += self._is_held and 2 in replies
        self._is_held = ttl_ms > 0
        if not all(replies):
            raise Fenced(f"another incarnation holds the lease of worker {self.worker}")

    def _call(self, key: str, ttl_ms: int) -> int:
        try:
            reply = self._client.execute_command("EVALSHA", RENEW.sha, 1, key, self.token, ttl_ms)
        except NoScriptError:
            reply = self._client.execute_command("EVAL", RENEW.text, 1, key, self.token, ttl_ms)
        return int(reply)
