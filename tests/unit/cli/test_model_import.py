"""The demo model: found where its package is, imported once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.model_import import DEMO, DEMO_DIRECTORY, demo_weights, ensure_demo_model, main
from common.errors import ConfigError
from tests.demo_model import demo_model_dir


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.mark.model
def test_the_demo_model_is_imported_once_and_then_found(tmp_path: Path, said: list[str]) -> None:
    demo_model_dir()  # skips where the package is missing
    first = ensure_demo_model(tmp_path, said.append)
    assert first == tmp_path / DEMO_DIRECTORY
    assert (first / "config.json").is_file()
    assert len(said) == 2
    assert ensure_demo_model(tmp_path, said.append) == first
    assert len(said) == 2


@pytest.mark.model
def test_an_installed_package_is_not_downloaded(tmp_path: Path, said: list[str]) -> None:
    demo_model_dir()
    assert demo_weights(tmp_path, said.append) == DEMO
    assert said == []


def test_a_source_that_is_not_there_is_a_mistake_in_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing-here"):
        main(
            ["--source", str(tmp_path / "nothing-here.gguf"), "--dest", str(tmp_path / "dest")], "headrace model import"
        )


def test_source_and_destination_are_required() -> None:
    with pytest.raises(ConfigError) as caught:
        main([], "headrace model import")
    assert [line.partition(":")[0] for line in caught.value.message.splitlines()] == ["source", "dest"]
