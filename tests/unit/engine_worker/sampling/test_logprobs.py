from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine_worker.sampling.logprobs import (
    _num_before,
    _num_before_on_device,
    prompt_logprobs,
    prompt_positions,
    token_logprobs,
)
from engine_worker.sampling.ranking import ranked, ranked_on_device
from engine_worker.sampling.sampler import Sampler
from engine_worker.step import ScheduledSequence
from tests.unit.engine_worker.sampling.reference import random_logits, sequence

Rank = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]


def test_logprobs_are_those_of_the_raw_logits_whatever_the_request_does_to_them() -> None:
    logits = random_logits(3, 500)
    rows = [
        sequence(temperature=0.0, logprobs=3),
        sequence(temperature=0.0),
        sequence(temperature=0.3, seed=1, logprobs=0, logit_bias={7: 100.0}, presence_penalty=2.0),
    ]
    first, second, third = Sampler(500).sample(logits.clone(), rows).sampled
    exact = torch.log_softmax(logits, dim=-1)
    top = exact[0].topk(3)
    assert first.logprobs is not None
    assert first.logprobs.top_ids == tuple(top.indices.tolist())
    assert first.logprobs.top_logprobs == tuple(top.values.tolist())
    assert (first.logprobs.rank, first.logprobs.logprob) == (1, top.values[0].item())
    assert second.logprobs is None
    assert third.token_id == 7
    assert third.logprobs is not None
    assert third.logprobs.logprob == exact[2, 7].item()
    assert third.logprobs.rank == int((exact[2] > exact[2, 7]).sum()) + 1
    assert third.logprobs.top_ids == ()


@pytest.mark.parametrize("k", [1, 5, 30])
def test_rank_counts_equal_tokens_by_id_and_agrees_with_the_top_list(k: int) -> None:
    values = torch.randint(0, 6, (20, 200), generator=torch.Generator().manual_seed(k)).float()
    logprobs = torch.log_softmax(values, dim=-1)
    for row in range(20):
        order = sorted(range(200), key=lambda token: (-values[row, token].item(), token))
        for token in (order[0], order[k - 1], order[k], order[-1], order[100]):
            score = token_logprobs(logprobs[row : row + 1], [token], [k])[0]
            assert score.rank == order.index(token) + 1
            assert list(score.top_ids) == order[:k]


def test_a_rank_is_the_same_however_it_is_counted() -> None:
    values = torch.randint(0, 40, (30, 200), generator=torch.Generator().manual_seed(3)).float()
    ids = torch.arange(30)[:, None] * 6
    rows = torch.arange(0, 30, 2)
    counted = [count(values, ids, values.gather(1, ids), rows) for count in (_num_before, _num_before_on_device)]
    assert counted[0].tolist() == counted[1].tolist()
    assert max(counted[0].tolist()) > 100


@pytest.mark.parametrize("rank", [ranked, ranked_on_device])
@pytest.mark.parametrize(("width", "k"), [(10, 10), (10, 9), (10, 1), (300, 7), (300, 299)])
def test_ranked_orders_by_value_then_token(rank: Rank, width: int, k: int) -> None:
    values = torch.randint(0, 5, (30, width), generator=torch.Generator().manual_seed(k)).float()
    found, ids = rank(values, k)
    for row in range(30):
        order = sorted(range(width), key=lambda token: (-values[row, token].item(), token))[:k]
        assert ids[row].tolist() == order
        assert found[row].tolist() == values[row, order].tolist()


@pytest.mark.parametrize("rank", [ranked, ranked_on_device])
def test_ranked_fills_up_with_tokens_that_cannot_be_drawn(rank: Rank) -> None:
    values = torch.full((1, 50), float("-inf"))
    values[0, [40, 7, 30]] = torch.tensor([1.0, 3.0, 1.0])
    found, ids = rank(values, 6)
    assert ids[0, :3].tolist() == [7, 30, 40]
    assert found[0].tolist() == [3.0, 1.0, 1.0] + [float("-inf")] * 3
    assert set(ids[0, 3:].tolist()).isdisjoint({7, 30, 40})


def test_a_row_s_logprobs_do_not_depend_on_the_batch() -> None:
    logits = random_logits(40, 3001)
    rows = [sequence(seed=i, logprobs=i % 4) for i in range(40)]
    together = Sampler(3001).sample(logits.clone(), rows).sampled
    for i, row in enumerate(rows):
        assert Sampler(3001).sample(logits[i : i + 1].clone(), [row]).sampled == (together[i],)


@pytest.mark.parametrize(
    ("scored", "start", "num_tokens", "positions"),
    [
        (1, 0, 4, range(1, 5)),  # a first chunk scores up to the token after it
        (5, 4, 3, range(5, 8)),
        (8, 7, 3, range(8, 10)),  # the last chunk: position 10 is the first output token
        (6, 4, 4, range(6, 9)),  # computed again after a preemption
        (10, 9, 1, range(0)),
        (10, 0, 10, range(0)),
    ],
)
def test_prompt_positions_follow_the_chunk(scored: int, start: int, num_tokens: int, positions: range) -> None:
    row = sequence(prompt=range(10), prompt_logprobs=1)
    row.num_scored_tokens = scored
    found = prompt_positions(ScheduledSequence(row, start, num_tokens, samples=False))
    assert list(found) == list(positions)


def test_prompt_logprobs_score_each_token_by_the_logits_before_it() -> None:
    row = sequence(prompt=[5, 9, 2, 7], prompt_logprobs=2)
    logits = random_logits(3, 20)
    scores = prompt_logprobs(logits.clone(), row, range(1, 4))
    exact = torch.log_softmax(logits, dim=-1)
    assert (scores.sequence, scores.start) == (row, 1)
    assert [s.logprob for s in scores.logprobs] == [exact[i, t].item() for i, t in enumerate([9, 2, 7])]
    assert [list(s.top_ids) for s in scores.logprobs] == exact.topk(2).indices.tolist()
