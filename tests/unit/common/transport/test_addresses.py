"""URLs of each kind of deployment."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from common.transport.addresses import Address, parse_address
from common.transport.connecting import connect
from common.transport.settings import RedisSettings


@pytest.mark.parametrize("url", ["redis://h:1/0", "rediss://u:p@h", "unix:///run/x.sock"])
def test_single_servers_keep_their_url(url: str) -> None:
    assert parse_address(url) == Address(kind="single", url=url)


def test_a_sentinel_url_names_hosts_service_and_database() -> None:
    url = "rediss+sentinel://us%40er:pa%3Ass@h1:1,h2,[::1]:3/name/4"
    assert parse_address(url) == Address(
        kind="sentinel",
        url=url,
        hosts=(("h1", 1), ("h2", 26379), ("::1", 3)),
        service="name",
        db=4,
        username="us@er",
        password="pa:ss",
        has_tls=True,
    )


def test_a_cluster_url_names_hosts() -> None:
    address = parse_address("redis+cluster://h1:7000,h2")
    assert (address.kind, address.hosts, address.has_tls) == ("cluster", (("h1", 7000), ("h2", 6379)), False)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:1",
        "redis://",
        "http://h",
        "redis+foo://h",
        "redis+sentinel://h:1",
        "redis+cluster://h:x",
        "redis+cluster://,",
    ],
)
def test_what_is_not_understood_is_a_configuration_mistake(url: str) -> None:
    with pytest.raises(ConfigError) as mistake:
        parse_address(url)
    assert mistake.value.param == "redis_url"


async def test_a_port_that_is_none_is_a_configuration_mistake() -> None:
    with pytest.raises(ConfigError):
        connect(RedisSettings(redis_url="redis://h:notaport/0"))
