"""Short ways to translate a body in tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.events import EngineRequest
from edge.translate.model import ServedModel
from edge.translate.presentation import Presentation, decode_presentation
from edge.translate.requests import (
    Admission,
    Translated,
    TranslationLimits,
    parse_chat,
    parse_completion,
    translate_chat,
    translate_completion,
)
from tests.unit.edge.served_models import served

ADMISSION = Admission(request_id="r1", arrival_s=1000.5, deadline_s=1600.5, tenant="t", trace={"traceparent": "00-x"})
STRICT = TranslationLimits()
COMPAT = TranslationLimits(compat=True)
USER = [{"role": "user", "content": "hi"}]


def translated_chat(
    model: ServedModel | None = None, limits: TranslationLimits = STRICT, /, **fields: Any
) -> Translated:
    body = {"messages": USER, **fields}
    return translate_chat(parse_chat(json.dumps(body).encode()), model or served(), ADMISSION, limits)


def translated_completion(
    model: ServedModel | None = None, limits: TranslationLimits = STRICT, /, **fields: Any
) -> Translated:
    body = {"prompt": "hi", **fields}
    return translate_completion(parse_completion(json.dumps(body).encode()), model or served(), ADMISSION, limits)


def chat(model: ServedModel | None = None, /, **fields: Any) -> EngineRequest:
    return translated_chat(model, **fields).request


def completion(model: ServedModel | None = None, /, **fields: Any) -> EngineRequest:
    return translated_completion(model, **fields).request


def shown(request: EngineRequest) -> Presentation:
    return decode_presentation(request.presentation)


def prompt_text(request: EngineRequest, model: ServedModel | None = None) -> str:
    return (model or served()).tokenizer.decode(request.prompts[0], skip_special_tokens=False)


def refusal(make: Any, **fields: Any) -> InvalidRequest:
    """The error of a body that must be refused."""
    with pytest.raises(InvalidRequest) as caught:
        make(**fields)
    return caught.value
