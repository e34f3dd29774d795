"""What serve is going to start, before it starts anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli import groups
from cli.serve import plan_children
from common.config import load
from common.errors import ConfigError


def variables(role: str, name: str, *argv: str) -> list[str | None]:
    """Of each child of one role."""
    loaded = load(groups.SERVE, ["some/model", *argv], prog="headrace serve", environ={})
    plan = plan_children(loaded, "redis://log", "some/model", [8000, 8001])
    return [spec.environ.get(name) for spec in plan.specs if spec.role == role]


def names_of(*argv: str) -> list[str | None]:
    return variables("worker", "HEADRACE_WORKER_NAME", *argv)


def test_workers_that_share_a_given_name_get_a_number_each() -> None:
    assert names_of("--worker-name", "gpu", "--workers", "3") == ["gpu-1", "gpu-2", "gpu-3"]


def test_a_single_worker_keeps_its_name_and_without_one_each_draws_its_own() -> None:
    assert names_of("--worker-name", "gpu") == ["gpu"]
    assert names_of("--workers", "2") == [None, None]


def test_the_caches_of_all_workers_together_take_the_share_of_memory_that_is_set() -> None:
    name = "HEADRACE_KV_CACHE_MEMORY_FRACTION"
    assert variables("worker", name) == ["0.5"]
    assert variables("worker", name, "--workers", "2") == ["0.25", "0.25"]
    assert variables("worker", name, "--workers", "2", "--memory-fraction", "0.8") == ["0.4", "0.4"]


def key_with(*argv: str) -> str:
    loaded = load(groups.SERVE, ["some/model", *argv], prog="headrace serve", environ={})
    return plan_children(loaded, "redis://log", "some/model", [8000]).key


def test_serve_asks_its_edges_with_a_key_that_they_accept(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# people\nsecond of two words\n")
    assert key_with() == ""
    assert key_with("--api-key", "first", "--api-key-file", str(file)) == "first"
    assert key_with("--api-key-file", str(file)) == "second of two words"


@pytest.mark.parametrize("argv", [("--api-key", ""), ("--api-key-file", "no-such-file")])
def test_a_key_that_cannot_be_had_is_a_mistake_of_the_configuration(argv: tuple[str, str]) -> None:
    with pytest.raises(ConfigError):
        key_with(*argv)


def test_edges_that_stop_together_finish_streams_instead_of_handing_them_over() -> None:
    assert variables("edge", "HEADRACE_DRAIN_HANDOVER") == ["false", "false"]
    assert variables("edge", "HEADRACE_DRAIN_HANDOVER", "--drain-handover") == [
        None,
        None,
    ]  # as edges are by themselves
