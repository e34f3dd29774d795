"""What the sampler does on a GPU, run on the CPU: the same tokens, and nothing asked of the device in between."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from engine_worker.sampling import draws
from engine_worker.sampling.batch import Batch
from engine_worker.sampling.ranking import ranked_on_device
from engine_worker.sampling.sampler import Sampler, draw_on_device
from engine_worker.sampling.scratch import Scratch
from tests.unit.engine_worker.sampling.reference import random_logits, sequence

VOCAB = 3001
WAITS = ("aten._local_scalar_dense", "aten.nonzero", "aten.equal", "aten.is_nonzero")


class Waits(TorchDispatchMode):
    """Notes operations for which a GPU would have to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(WAITS):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "ranked", ranked_on_device)


MIXED = [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 20, "top_p": 0.9}, {"top_k": 1}, {"top_k": 5}]


def test_tokens_equal_those_drawn_on_the_cpu_and_nothing_waits() -> None:
    rows = [sequence(seed=i, **MIXED[i % len(MIXED)]) for i in range(40)]
    # Rounded as a 16-bit head gives them: many are equal.
    logits = random_logits(40, VOCAB).bfloat16().float()
    want = [token.token_id for token in Sampler(VOCAB).sample(logits.clone(), rows).sampled]
    batch = Batch(rows, VOCAB, None, logits.device)
    with Waits() as waits:
        got = draw_on_device(logits.clone(), batch, {}, Scratch())
    assert got == want
    assert waits.seen == []


def test_rows_with_top_p_alone_wait_once_for_all_of_them() -> None:
    rows = [sequence(seed=i, top_p=0.9) for i in range(20)]
    logits = random_logits(20, VOCAB)
    want = [token.token_id for token in Sampler(VOCAB).sample(logits.clone(), rows).sampled]
    with Waits() as waits:
        got = draw_on_device(logits.clone(), Batch(rows, VOCAB, None, logits.device), {}, Scratch())
    assert got == want
    assert len(waits.seen) == 1


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_row_without_a_token_fails_alone(poison: float) -> None:
    rows = [sequence(seed=i, **MIXED[i % len(MIXED)]) for i in range(5)]
    logits = random_logits(5, VOCAB)
    logits[1] = poison
    want = Sampler(VOCAB).sample(logits.clone(), rows)
    failed: dict[int, str] = {}
    got = draw_on_device(logits, Batch(rows, VOCAB, None, logits.device), failed, Scratch())
    assert [got[i] for i in (0, 2, 3, 4)] == [token.token_id for token in want.sampled]
    assert list(failed.values()) == [reason for _, reason in want.failed]
    assert list(failed) == [1]
