"""GET /docs and /openapi.json. The page is our own and loads nothing from elsewhere: it works in closed networks."""

from __future__ import annotations

from pathlib import Path

import msgspec
from fastapi import APIRouter, Request, Response

router = APIRouter()
_PAGE = (Path(__file__).parent.parent / "static" / "docs.html").read_bytes()


@router.get("/docs")
async def docs() -> Response:
    """The API for people."""
    return Response(_PAGE, media_type="text/html; charset=utf-8")


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """The API for programs."""
    return Response(msgspec.json.encode(request.app.state.openapi), media_type="application/json")
