"""URLs of the kinds of deployment."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed URL. ``kind``: "single" (``url`` is the library's own form), "sentinel" or "cluster"."""

    kind: str
    url: str
    hosts: tuple[tuple[str, int], ...] = ()
    service: str = ""
    db: int = 0
    username: str | None = None
    password: str | None = None
    has_tls: bool = False


def parse_address(url: str) -> Address:
    """Raises `ConfigError` for what is not one of the supported forms."""
    scheme, _, rest = url.partition("://")
    if scheme in ("redis", "rediss", "unix") and rest:
        return Address(kind="single", url=url)
    base, _, kind = scheme.partition("+")
    if base not in ("redis", "rediss") or kind not in ("sentinel", "cluster"):
        raise ConfigError(f"redis_url: scheme {scheme!r} is not supported", param="redis_url")
    userinfo, _, host_list = rest.partition("/")[0].rpartition("@")
    path = [unquote(part) for part in rest.partition("/")[2].split("/") if part]
    username, _, password = userinfo.partition(":")
    hosts = tuple(_host(item, 26379 if kind == "sentinel" else 6379) for item in host_list.split(","))
    if kind == "sentinel" and not path:
        raise ConfigError("redis_url: a sentinel URL ends with /<service name>", param="redis_url")
    if len(path) > 1 and not path[1].isdecimal():
        raise ConfigError("redis_url: the database is a number", param="redis_url")
    return Address(
        kind=kind,
        url=url,
        hosts=hosts,
        service=path[0] if kind == "sentinel" else "",
        db=int(path[1]) if len(path) > 1 else 0,
        username=unquote(username) or None,
        password=unquote(password) or None,
        has_tls=base == "rediss",
    )


def _host(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"redis_url: {text!r} is not host:port", param="redis_url") from error
    if not host:
        raise ConfigError(f"redis_url: {text!r} is not host:port", param="redis_url")
    return host, port or default_port
