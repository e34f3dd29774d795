"""What the transport wants of the redis library's clients, whatever kind of server there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from common.transport.settings import RedisSettings

MAX_BLOCK_MS: Final = 5000

Client = Any
"""One of the library's clients: its own types are unions of the synchronous and the asynchronous form."""


@dataclass(frozen=True, slots=True)
class PushSource:
    """One connection's worth of channels."""

    client: Client
    channels: tuple[str, ...]
    is_sharded: bool


class Connections(Protocol):
    """The clients of one process: one for commands, one for blocking reads."""

    is_cluster: bool

    async def execute(self, *args: Any, key: str, is_blocking: bool = False) -> Any:
        """One command on the node that holds ``key``."""

    async def execute_and_wait(self, *args: Any, key: str, replicas: int, wait_ms: int) -> tuple[Any, int]:
        """A command and WAIT on the same connection (WAIT speaks of its own connection's writes)."""

    async def refresh(self) -> None:
        """Forget connections and addresses that may be dead; what is in use is left alone."""

    async def ping(self) -> None:
        """Every primary answers."""

    async def on_primaries(self, *args: str) -> list[Any]:
        """A command on every primary."""

    async def scan(self, pattern: str) -> list[bytes]:
        """Keys of all primaries that match, in no order."""

    def push_sources(self, channels: Sequence[str]) -> list[PushSource]:
        """How to subscribe to the channels."""

    async def close(self) -> None: ...


def common_options(settings: RedisSettings, timeout_s: float) -> dict[str, Any]:
    return {
        "protocol": 2,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": settings.redis_connect_timeout_s,
        "driver_info": None,  # else each client looks its own version up on the file system
        "decode_responses": False,
    }


def blocking_timeout_s(settings: RedisSettings) -> float:
    return MAX_BLOCK_MS / 1000 + settings.redis_timeout_s
