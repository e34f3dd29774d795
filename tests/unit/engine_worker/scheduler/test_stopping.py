from __future__ import annotations

from typing import Any

import pytest

from common.events import FinishReason, Grammar, SamplingParams
from engine_worker.scheduler.stopping import Ending, ending_of
from engine_worker.sequence import Sequence

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def after(output: tuple[int, ...], *, max_model_len: int = 100, **sampling: Any) -> Ending | None:
    params = SamplingParams(**{"max_tokens": 10, "eos_token_ids": (0, 1), "stop_token_ids": (7, 1), **sampling})
    return ending_of(
        Sequence(
            seq_id=1,
            request_id="r",
            choice=0,
            prompt_token_ids=(7, 0, 7),
            output_token_ids=output,
            sampling=params,
            max_model_len=max_model_len,
        )
    )


@pytest.mark.parametrize(
    ("output", "options", "ending"),
    [
        ((), {}, None),
        ((5,), {}, None),
        ((5, 0), {}, Ending(STOP)),
        ((5, 7), {}, Ending(STOP, 7)),
        ((5, 1), {}, Ending(STOP)),  # the model's own end counts before the client's
        ((5, 1), {"ignore_eos": True}, Ending(STOP, 1)),
        ((5, 0), {"ignore_eos": True}, None),
        ((5, 0), {"min_tokens": 2}, None),
        ((5, 0), {"min_tokens": 1}, Ending(STOP)),
        ((5, 0), {"min_tokens": 5, "grammar": Grammar(kind="regex", source="a")}, Ending(STOP)),
        ((5,) * 10, {}, Ending(LENGTH)),
        ((5,) * 9 + (0,), {}, Ending(STOP)),
        ((5,), {"max_model_len": 4}, Ending(LENGTH)),
        ((), {"max_tokens": 0}, Ending(LENGTH)),
    ],
)
def test_endings(output: tuple[int, ...], options: dict[str, Any], ending: Ending | None) -> None:
    assert after(output, **options) == ending
