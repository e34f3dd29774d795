"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from edge.generation import COMPLETION, create
from edge.openai.completions import CompletionRequest
from edge.openapi import json_body
from edge.routes.plain_route import PlainRoute

router = APIRouter(tags=["generation"], route_class=PlainRoute)


@router.post("/v1/completions", openapi_extra=json_body(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """The continuation of one or several prompts, as one JSON document or as a stream."""
    return await create(request, COMPLETION)
