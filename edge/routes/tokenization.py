"""POST /tokenize and /detokenize, with and without the /v1 prefix; GET /tokenizer_info."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request, Response

from edge.body import read_body
from edge.dependencies import services_of
from edge.openai.tokenize import DetokenizeRequest, TokenizeRequest
from edge.openapi import json_body
from edge.request_context import context_of
from edge.translate.tokenization import detokenize, parse_detokenize, parse_tokenize, tokenize

if TYPE_CHECKING:
    from collections.abc import Callable

    from edge.translate.model import ServedModel

router = APIRouter(tags=["tokenization"])


@router.post("/tokenize", openapi_extra=json_body(TokenizeRequest))
@router.post("/v1/tokenize", include_in_schema=False)
async def create_tokens(request: Request) -> Response:
    """Token ids of a text or of a conversation, as a generation would get them."""
    return await _answer(request, parse_tokenize, tokenize)


@router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest))
@router.post("/v1/detokenize", include_in_schema=False)
async def create_text(request: Request) -> Response:
    """The text that token ids spell."""
    return await _answer(request, parse_detokenize, detokenize)


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, model: str | None = None) -> Response:
    """The model's tokenizer configuration and chat template, as evaluation tools read them."""
    card = services_of(request).catalog.find(model).card
    about = card.tokenizer_config | {"chat_template": card.chat_template, "model_max_length": card.max_model_len}
    return Response(msgspec.json.encode(about), media_type="application/json")


async def _answer(
    request: Request, parse: Callable[[bytes], Any], compute: Callable[[Any, ServedModel], Any]
) -> Response:
    """What ``compute`` makes of the body; beside the event loop, since texts are long."""
    services = services_of(request)
    tally = services.occupancy.tally(context_of(request.scope).tenant)
    raw = await read_body(request, services.limits, tally)
    try:
        body = await services.in_thread(lambda: parse(raw))
        model = await services.catalog.known(body.model)
        answer = await services.in_thread(lambda: msgspec.json.encode(compute(body, model)))
    finally:
        tally.give(len(raw))
    return Response(answer, media_type="application/json")
