from __future__ import annotations

import pytest
from pydantic import ValidationError

from engine_worker.config import SchedulerSettings


def test_tenant_weights_are_read_from_one_string() -> None:
    assert SchedulerSettings(tenant_weights="a=2, b=0.5").tenant_weights == {"a": 2.0, "b": 0.5}
    assert SchedulerSettings(tenant_weights="").tenant_weights == {}


@pytest.mark.parametrize("weights", ["a", "a=x", "a=0", "a=-1", "a=nan"])
def test_a_wrong_weight_is_refused(weights: str) -> None:
    with pytest.raises(ValidationError, match="tenant_weights"):
        SchedulerSettings(tenant_weights=weights)


def test_every_running_sequence_must_be_able_to_decode_in_a_step() -> None:
    with pytest.raises(ValidationError, match="must be at least max_num_seqs"):
        SchedulerSettings(max_num_seqs=100, max_num_batched_tokens=50)
