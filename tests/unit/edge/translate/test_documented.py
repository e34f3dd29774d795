"""A parameter that the API's page does not mention is no parameter."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.openai.chat import ChatCompletionRequest
from edge.openai.completions import CompletionRequest
from edge.translate.parameters import HARMLESS

PAGE = Path(__file__).parents[4] / "docs" / "api.md"
FIELDS = {*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *HARMLESS} - {
    "unknown_fields"
}


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_every_parameter_is_documented(field: str) -> None:
    assert f"`{field}`" in PAGE.read_text()
