"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from edge.generation import CHAT, create
from edge.openai.chat import ChatCompletionRequest
from edge.openapi import json_body
from edge.routes.plain_route import PlainRoute

router = APIRouter(tags=["generation"], route_class=PlainRoute)


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatCompletionRequest))
async def create_chat_completion(request: Request) -> Response:
    """The model's next message in a conversation, as one JSON document or as a stream."""
    return await create(request, CHAT)
