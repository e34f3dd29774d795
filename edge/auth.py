"""Bearer keys: who may call which path, and which tenant a key stands for."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import TYPE_CHECKING, Final

from common.errors import ConfigError
from edge.errors import Unauthorized

if TYPE_CHECKING:
    from edge.config import ApiSettings

OPEN_PATHS: Final = frozenset({"/", "/health", "/ready", "/ping", "/version", "/docs", "/openapi.json"})
METRICS_PATH: Final = "/metrics"


class ApiKeys:
    """The accepted keys, kept as digests only. Without any key every caller is let in as the tenant ``""``."""

    def __init__(self, keys: tuple[str, ...], *, guard_metrics: bool = False) -> None:
        self._digests = {_digest(key): _tenant(key) for key in keys}
        self._guard_metrics = guard_metrics

    @classmethod
    def from_settings(cls, settings: ApiSettings) -> ApiKeys:
        """Raises as `accepted_keys` does."""
        return cls(accepted_keys(settings), guard_metrics=settings.metrics_need_key)

    def is_open(self, method: str, path: str) -> bool:
        """Whether a path is served without a key. Preflight requests carry none, by specification."""
        if not self._digests or method == "OPTIONS" or path in OPEN_PATHS or path.startswith("/docs/"):
            return True
        return path == METRICS_PATH and not self._guard_metrics

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant of an ``Authorization`` header. Raises `Unauthorized`.

        Every accepted key is compared, in constant time, whichever matches: the time taken says nothing of the keys.
        """
        if not self._digests:
            return ""
        scheme, _, credentials = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not credentials.strip():
            raise Unauthorized("You did not provide an API key: send it as 'Authorization: Bearer KEY'.")
        given = _digest(credentials.strip())
        tenant: str | None = None
        for digest, name in self._digests.items():
            if hmac.compare_digest(digest, given):
                tenant = name
        if tenant is None:
            raise Unauthorized("The API key is not valid.")
        return tenant


def accepted_keys(settings: ApiSettings) -> tuple[str, ...]:
    """The keys as they are given and as the key file holds them.

    Raises `ConfigError` when one is empty, or the key file cannot be read or holds none: a server whose key came from
    a variable that is not set must not let everybody in.
    """
    keys = [key.get_secret_value().strip() for key in settings.api_keys]
    if not all(keys):
        raise ConfigError("api_keys: a key must not be empty (--api-key)")
    if settings.api_key_file:
        keys += _read_key_file(Path(settings.api_key_file))
    return tuple(keys)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _tenant(key: str) -> str:
    """A name for the caller that may stand in logs and in the request log; the key cannot be found from it."""
    return hashlib.sha256(b"headrace tenant:" + key.encode()).hexdigest()[:12]


def _read_key_file(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"api_key_file cannot be read: {error.strerror}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError("api_key_file holds no key")
    return keys
