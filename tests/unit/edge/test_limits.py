"""Places: taken, given back, refused at the limit."""

from __future__ import annotations

import pytest

from common.errors import Overloaded, TenantLimitReached
from edge.config import LimitSettings
from edge.limits import Occupancy


def test_generations_over_the_limit_are_refused_until_one_ends() -> None:
    places = Occupancy(LimitSettings(max_streams=2))
    places.take_generation("a")
    places.take_generation("b")
    with pytest.raises(Overloaded):
        places.take_generation("c")
    places.give_generation("a")
    places.take_generation("c")
    assert places.generations == 2


def test_one_tenant_cannot_take_all_places() -> None:
    places = Occupancy(LimitSettings(max_streams=10, max_streams_per_tenant=2))
    places.take_generation("a")
    places.take_generation("a")
    with pytest.raises(TenantLimitReached):
        places.take_generation("a")
    places.take_generation("b")
    places.give_generation("a")
    places.take_generation("a")


def test_open_requests_over_the_limit_are_refused() -> None:
    places = Occupancy(LimitSettings(max_connections=1))
    with places.request():
        assert places.requests == 1
        with pytest.raises(Overloaded), places.request():
            pass
    assert places.requests == 0


def test_each_tenant_has_its_own_bytes() -> None:
    places = Occupancy(LimitSettings(max_tenant_bytes=100))
    a, b = places.tally("a"), places.tally("b")
    assert a.take(60)
    assert not a.take(41)
    assert (a.held, b.held) == (60, 0)
    assert b.take(100)
    a.give(60)
    assert a.take(100)
    assert places.tally("a") is a


def test_without_a_limit_bytes_are_counted_and_never_refused() -> None:
    tally = Occupancy(LimitSettings(max_tenant_bytes=0)).tally("a")
    assert tally.take(1 << 60)
    assert tally.held == 1 << 60
