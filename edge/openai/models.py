"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import msgspec

from common.model_card import ModelCard

OWNER = "headrace"


class ModelObject(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = OWNER
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelObject]


def model_objects(card: ModelCard) -> list[ModelObject]:
    """One entry for each name under which the model is served."""
    return [
        ModelObject(id=name, created=int(card.created_s), root=card.root or card.name, max_model_len=card.max_model_len)
        for name in card.served_names
    ]
