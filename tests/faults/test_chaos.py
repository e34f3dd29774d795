"""Faults at random and traffic of every kind: no promise is broken. Longer runs: ``make chaos``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.chaos import Outcome, Plan, run

pytestmark = [pytest.mark.e2e]


def assert_kept(outcome: Outcome) -> None:
    """No promise was broken, and there was something to break."""
    assert outcome.findings.wrong == []
    assert outcome.findings.lost == outcome.findings.repeated == 0
    assert outcome.findings.checked_answers > 5
    assert outcome.injector.had_every_kind


@pytest.mark.timeout(600)
async def test_a_short_storm_breaks_no_promise(tmp_path: Path) -> None:
    assert_kept(await run(Plan(seconds=15, seed=5, every_s=1.0, concurrency=6, short=True, links=True), tmp_path))


@pytest.mark.timeout(600)
async def test_failovers_of_a_strict_cluster_break_no_promise(tmp_path: Path) -> None:
    assert_kept(await run(Plan(seconds=10, seed=7, every_s=1.0, concurrency=6, short=True, layout="cluster"), tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["single", "sentinel", "cluster"])
async def test_a_long_storm_breaks_no_promise(tmp_path: Path, layout: str) -> None:
    links = layout == "single"
    assert_kept(await run(Plan(seconds=180, seed=6, layout=layout, workers=3, short=True, links=links), tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_log_that_syncs_every_second_breaks_no_promise_while_its_disk_keeps_up(tmp_path: Path) -> None:
    assert_kept(await run(Plan(seconds=180, seed=6, durability="standard", workers=3), tmp_path))
