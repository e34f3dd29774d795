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
