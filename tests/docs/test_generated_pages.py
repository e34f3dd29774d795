"""A setting, metric, error code or event that is not documented fails here; `make docs` mends it."""

from __future__ import annotations

import re

import pytest

from cli.groups import ALL
from cli.reference import PAGES, ROOT

PACKAGES = ("common", "edge", "engine_worker", "cli")


@pytest.mark.parametrize("path", PAGES)
def test_the_page_is_what_the_source_says(path: str) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == PAGES[path](), "stale: run `make docs`"


def test_every_group_of_settings_is_documented() -> None:
    declared = {
        name
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in re.findall(r"^class (\w+)\(Settings\)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    page = PAGES["docs/configuration.md"]()
    documented = {name for name in declared if f"File table `[{_section(name)}]`" in page}
    assert declared - documented == set()
    assert {group.__name__ for group in ALL} <= declared


def test_every_setting_says_what_it_means() -> None:
    silent = [line for line in PAGES["docs/configuration.md"]().splitlines() if line.endswith("|  |")]
    assert silent == []


def _section(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name.removesuffix("Settings")).lower()


def test_every_setting_is_described_in_a_sentence() -> None:
    rows = [line for line in PAGES["docs/configuration.md"]().splitlines() if line.startswith("| `")]
    assert rows
    assert [row for row in rows if not row.endswith((". |", "? |"))] == []
