"""GET /v1/models and /v1/models/{id}, ids with slashes included."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from edge.dependencies import services_of
from edge.errors import PathNotFound
from edge.openai.models import ModelList, ModelObject, model_objects

router = APIRouter(tags=["models"])


@router.get("/v1/models")
@router.head("/v1/models", include_in_schema=False)
async def list_models(request: Request) -> Response:
    """The models that can be asked for, under every name they are served by."""
    catalog = services_of(request).catalog
    offered = {model.card.name: model.card for model in catalog.models.values() if catalog.is_offered(model.card.name)}
    objects = [item for name in sorted(offered) for item in model_objects(offered[name])]
    return _json(ModelList(data=objects))


@router.get("/v1/models/{model_id:path}")
@router.head("/v1/models/{model_id:path}", include_in_schema=False)
async def get_model(request: Request, model_id: str) -> Response:
    """One model. 404 with `model_not_found` when no worker ever registered it."""
    if not model_id:  # of a list's address with a slash too many; no name means the default model elsewhere
        raise PathNotFound("There is no /v1/models/ here. Did you mean /v1/models?")
    card = services_of(request).catalog.find(model_id).card
    return _json(next(item for item in model_objects(card) if item.id == model_id))


def _json(answer: ModelList | ModelObject) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
