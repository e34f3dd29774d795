"""Faults at random and traffic of every kind: no promise is broken. Longer runs: ``make chaos``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.chaos import Plan, run

pytestmark = [pytest.mark.e2e]


@pytest.mark.timeout(240)
async def test_a_short_storm_breaks_no_promise(tmp_path: Path) -> None:
    outcome = await run(Plan(seconds=20, seed=5, every_s=1.5, concurrency=4), tmp_path)
    assert outcome.findings.wrong == []
    assert outcome.findings.lost == outcome.findings.repeated == 0
    assert outcome.findings.checked_answers > 5
    assert outcome.injector.had_every_kind


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("durability", ["standard", "strict"])
async def test_a_long_storm_breaks_no_promise(tmp_path: Path, durability: str) -> None:
    outcome = await run(Plan(seconds=180, seed=6, durability=durability, workers=3), tmp_path)
    assert outcome.findings.wrong == []
    assert outcome.findings.takeovers
