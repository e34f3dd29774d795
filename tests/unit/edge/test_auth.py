"""Keys: from settings and files, what they open, which tenant they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import ConfigError
from edge.auth import ApiKeys
from edge.config import ApiSettings
from edge.errors import Unauthorized


def test_without_keys_everybody_is_let_in() -> None:
    keys = ApiKeys(())
    assert keys.is_open("POST", "/v1/chat/completions")
    assert keys.tenant_of(None) == ""


def test_a_key_stands_for_one_tenant_that_does_not_betray_it() -> None:
    keys = ApiKeys(("one", "two"))
    first, second = keys.tenant_of("Bearer one"), keys.tenant_of("bearer two")
    assert first != second
    assert "one" not in first
    assert keys.tenant_of("Bearer one") == first


@pytest.mark.parametrize("header", [None, "", "one", "Bearer", "Bearer  ", "Basic one", "Bearer onе", "Bearer one two"])
def test_anything_else_is_refused(header: str | None) -> None:
    with pytest.raises(Unauthorized):
        ApiKeys(("one",)).tenant_of(header)


@pytest.mark.parametrize("path", ["/health", "/ready", "/ping", "/version", "/metrics"])
def test_probes_are_open(path: str) -> None:
    assert ApiKeys(("one",)).is_open("GET", path)


@pytest.mark.parametrize("path", ["/v1/models", "/tokenize", "/load", "/anything", "/health/", "/healthz"])
def test_the_rest_is_not(path: str) -> None:
    assert not ApiKeys(("one",)).is_open("GET", path)


def test_preflight_needs_no_key() -> None:
    assert ApiKeys(("one",)).is_open("OPTIONS", "/v1/models")


def test_metrics_may_be_guarded() -> None:
    assert not ApiKeys(("one",), guard_metrics=True).is_open("GET", "/metrics")


def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# people\none\n\n  two  \n")
    keys = ApiKeys.from_settings(ApiSettings(api_keys=("three",), api_key_file=str(file)))
    assert len({keys.tenant_of(f"Bearer {key}") for key in ("one", "two", "three")}) == 3


@pytest.mark.parametrize("given", [("",), (" ",), ("one", "")])
def test_an_empty_key_is_a_mistake_and_not_an_open_door(given: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="api_keys"):
        ApiKeys.from_settings(ApiSettings(api_keys=given))


@pytest.mark.parametrize("content", [None, "", "# nobody\n"])
def test_a_file_without_keys_is_a_mistake(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match="api_key_file"):
        ApiKeys.from_settings(ApiSettings(api_key_file=str(file)))
