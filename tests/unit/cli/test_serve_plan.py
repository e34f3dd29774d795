"""What serve is going to start, before it starts anything."""

from __future__ import annotations

from cli import groups
from cli.serve import plan_children
from common.config import load


def names_of(*argv: str) -> list[str | None]:
    loaded = load(groups.SERVE, ["some/model", *argv], prog="headrace serve", environ={})
    plan = plan_children(loaded, "redis://log", "some/model", [8000])
    return [spec.environ.get("HEADRACE_WORKER_NAME") for spec in plan.specs if spec.role == "worker"]


def test_workers_that_share_a_given_name_get_a_number_each() -> None:
    assert names_of("--worker-name", "gpu", "--workers", "3") == ["gpu-1", "gpu-2", "gpu-3"]


def test_a_single_worker_keeps_its_name_and_without_one_each_draws_its_own() -> None:
    assert names_of("--worker-name", "gpu") == ["gpu"]
    assert names_of("--workers", "2") == [None, None]
