"""The schemas of bodies that are parsed by hand, for the OpenAPI document."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from fastapi import FastAPI

_REFERENCE = "#/components/schemas/{name}"
_bodies: set[type[msgspec.Struct]] = set()


def json_body(body: type[msgspec.Struct]) -> dict[str, Any]:
    """``openapi_extra`` of a route whose JSON body is ``body``."""
    _bodies.add(body)
    schema = {"$ref": _REFERENCE.format(name=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def complete_openapi(app: FastAPI) -> dict[str, Any]:
    """The application's OpenAPI document with the schemas of all bodies and of the error object."""
    document = app.openapi()
    kinds = sorted(_bodies, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components |= schemas | {"ErrorResponse": _ERROR_RESPONSE}
    for path in document["paths"].values():
        for operation in path.values():
            answers = operation.setdefault("responses", {})
            answers.pop("422", None)  # the framework's own validation never answers here
            answers["default"] = {
                "description": "Every error has this body.",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}},
            }
    for name in ("HTTPValidationError", "ValidationError"):
        components.pop(name, None)
    return document


_ERROR_RESPONSE = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
