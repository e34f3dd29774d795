"""The number of threads follows what steps turn out to cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_worker.kernels.team_size import TeamSize


def run(team: TeamSize, num_tokens: int, seconds: Callable[[int], float], num_steps: int) -> list[int]:
    """The sizes chosen; ``seconds`` of a step on so many threads."""
    chosen = []
    for _ in range(num_steps):
        size = team.choose(num_tokens)
        chosen.append(size)
        team.report(num_tokens, size, seconds(size))
    return chosen


@pytest.mark.parametrize(
    ("max_threads", "sizes"), [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (12, (1, 2, 4, 8, 12))]
)
def test_sizes_are_powers_of_two_up_to_the_most(max_threads: int, sizes: tuple[int, ...]) -> None:
    assert TeamSize(max_threads).sizes == sizes


def test_all_threads_where_they_help() -> None:
    chosen = run(TeamSize(8), 512, lambda size: 1 / size, 2000)
    assert chosen[:3] == [8, 8, 8]
    assert sum(size != 8 for size in chosen) < 40


def test_one_thread_where_more_gain_little() -> None:
    chosen = run(TeamSize(2), 1, lambda size: 1 / (1 + 0.05 * size), 200)
    assert chosen[10:].count(1) > 170


def test_the_middle_is_found_where_more_and_fewer_are_worse() -> None:
    chosen = run(TeamSize(16), 64, lambda size: abs(size - 4) + 1, 3000)
    assert chosen[-200:].count(4) > 190


def test_a_busy_neighbour_is_evaded_at_once_and_its_end_is_noticed() -> None:
    team = TeamSize(2)
    run(team, 1, lambda size: 1 / size, 200)
    contended = run(team, 1, lambda size: 1 if size == 1 else 10, 2000)
    assert contended[3] == 1
    assert contended.count(2) < 12
    assert run(team, 1, lambda size: 1 / size, 3000)[-1000:].count(2) > 950


@pytest.mark.parametrize("slow", [(0,), (0, 1), (20, 21), (4,), (5,)])
def test_single_slow_steps_do_not_cost_a_thread(slow: tuple[int, ...]) -> None:
    team = TeamSize(2)
    steps = iter(range(200))
    chosen = run(team, 200, lambda size: (10 if next(steps) in slow else 1) / size, 200)
    assert chosen.count(1) < 4


def test_more_threads_are_tried_again_soon() -> None:
    team = TeamSize(2)
    run(team, 200, lambda size: 1 if size == 1 else 1.5, 50)
    assert team.choose(200) == 1
    assert run(team, 200, lambda size: 1 / size, 40)[-10:].count(2) == 10


def test_steps_of_different_sizes_are_learnt_apart() -> None:
    team = TeamSize(2)
    for _ in range(100):
        run(team, 1, lambda size: float(size), 1)
        run(team, 500, lambda size: 1 / size, 1)
    assert (team.choose(1), team.choose(500)) == (1, 2)


def test_a_team_of_one_stays_one() -> None:
    assert set(run(TeamSize(1), 3, lambda _: 1.0, 100)) == {1}
