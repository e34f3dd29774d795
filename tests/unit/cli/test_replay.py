"""A replay is compared with its log, choice by choice."""

from __future__ import annotations

from cli.replay import FORMAT_FLAGS, GROUPS, Difference, compare, fingerprint_lines
from common.config_fields import settings_of
from common.events import Recorded, Started
from common.request_state import ChoiceState, RequestState

STATE = RequestState(choices={0: ChoiceState(token_ids=(1, 2, 3)), 1: ChoiceState(token_ids=(4, 5))})


def test_tokens_behind_the_end_of_a_log_do_not_count() -> None:
    assert list(compare(STATE, {0: (1, 2, 3, 9), 1: (4, 5)})) == []


def test_the_first_difference_of_each_choice_is_named() -> None:
    assert list(compare(STATE, {0: (1, 7, 8), 1: (4,)})) == [Difference(0, 1, 2, 7), Difference(1, 1, 5, None)]


def test_other_weights_are_said() -> None:
    events = [Recorded(1, Started(epoch=1, t=0.0, worker="w", weights_fingerprint="abc"))]
    assert list(fingerprint_lines(events, "abc")) == ["weights and format abc, the same as recorded"]
    differ, hint = fingerprint_lines(events, "xyz")
    assert differ == "weights and format xyz, recorded abc: NOT the same weights, or not computed in the same way"
    assert "--kv-cache-dtype" in hint


def test_the_flags_that_are_named_are_there() -> None:
    flags = {setting.flag for group in GROUPS for setting in settings_of("", group)}
    assert set(FORMAT_FLAGS) <= flags
