from __future__ import annotations

import pytest
from pydantic import ValidationError

from common.config import load
from common.errors import ConfigError
from edge.config import LimitSettings


def test_tenant_weights_are_read_from_one_string() -> None:
    assert LimitSettings(tenant_weights="a=2, b=0.5").tenant_weights == {"a": 2.0, "b": 0.5}
    assert LimitSettings(tenant_weights="").tenant_weights == {}


@pytest.mark.parametrize("weights", ["a", "a=x", "a=0", "a=-1", "a=nan", "a=1e-6", "a=inf"])
def test_a_wrong_weight_is_refused(weights: str) -> None:
    with pytest.raises(ValidationError, match="tenant_weights"):
        LimitSettings(tenant_weights=weights)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("a", "should be tenant=weight pairs, such as a=2,b=0.5, got 'a'"),
        ("a=0", "the weight of 'a' must be from 0.001 to 1000, got 'a=0'"),
    ],
)
def test_a_refusal_names_the_setting_and_its_value_once(given: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([LimitSettings], ["--tenant-weights", given], environ={})
    assert caught.value.message == f"tenant_weights: {message} (--tenant-weights)"
