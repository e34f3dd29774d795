"""Questions about a JSON schema that the grammar compiler does not answer, and how we make one ready for it.

A schema here is what a client sent: any JSON. The walk visits only places where a schema stands, so that data (enum,
const, default) is never taken for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from common.errors import InvalidRequest

MAX_SCHEMA_DEPTH: Final = 64
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE: Final = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else")
_OPEN_ENDED: Final = ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "$ref")
OPTIONS_KEY: Final = "x-guidance"  # how the compiler is told options; a client's own would loosen the constraint

Schema = dict[str, Any]


def children(schema: Schema) -> Iterator[Any]:
    """The schemas directly inside ``schema``; what stands where a schema should is given out whatever it is."""
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            yield from schema[key].values()
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from schema[key]
    for key in _SINGLE:
        value = schema.get(key)
        if isinstance(value, list):  # items as a list, as older drafts had it
            yield from value
        elif value is not None:
            yield value


def walk(schema: Schema) -> Iterator[Schema]:
    """``schema`` and every schema object inside it."""
    stack = [schema]
    while stack:
        current = stack.pop()
        yield current
        stack.extend(child for child in children(current) if isinstance(child, dict))


def check_depth(schema: Schema, param: str) -> None:
    """Raises `InvalidRequest` when schemas are nested too deeply for recursive code."""
    level, depth = [schema], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise InvalidRequest(f"{param}: the schema is nested more than {MAX_SCHEMA_DEPTH} levels deep", param=param)
        level = [child for parent in level for child in children(parent) if isinstance(child, dict)]


def check_finite(schema: Schema, param: str) -> None:
    """Raises `InvalidRequest` when no finite value fits: a $ref cycle with no way out.

    The least fixed point of "some finite value fits": starts with nothing known and goes on while more becomes known.
    References that lead nowhere count as finite here; the compiler refuses them with a better message.
    """
    finite: set[int] = set()
    nodes = list(walk(schema))
    changed = True
    while changed:
        changed = False
        for node in reversed(nodes):
            if id(node) not in finite and _fits_something(node, schema, finite):
                finite.add(id(node))
                changed = True
    if id(schema) not in finite:
        raise InvalidRequest(f"{param}: a $ref cycle has no end, so that no finite value can match", param=param)


def _fits_something(node: Schema, root: Schema, finite: set[int]) -> bool:
    def known(child: object) -> bool:
        return not isinstance(child, dict) or id(child) in finite

    if "enum" in node or "const" in node:
        return True
    if "$ref" in node and not known(_resolve(root, node["$ref"])):
        return False
    if not all(known(part) for part in _as_list(node.get("allOf"))):
        return False
    for key in ("anyOf", "oneOf"):
        parts = _as_list(node.get(key))
        if parts and not any(known(part) for part in parts):
            return False
    return _shape_fits(node, known)


def _shape_fits(node: Schema, known: Any) -> bool:
    """Whether the required members of an object, or the least items of an array, can be finite."""
    types = node.get("type")
    kinds = [types] if isinstance(types, str) else _as_list(types)
    if not kinds or any(kind not in ("object", "array") for kind in kinds):
        return True
    properties = node.get("properties")
    required = _as_list(node.get("required"))
    members = properties if isinstance(properties, dict) else {}
    if "object" in kinds and all(known(members.get(name)) for name in required if isinstance(name, str)):
        return True
    least = node.get("minItems")
    needed = int(least) if isinstance(least, int | float) else 0
    prefix = _as_list(node.get("prefixItems"))
    items = node.get("items") if needed > len(prefix) else None
    return "array" in kinds and (needed <= 0 or all(known(item) for item in [*prefix[:needed], items]))


def _as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _resolve(root: Schema, reference: object) -> object:
    """The target of a local JSON pointer; None for anything else."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    target: Any = root
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = target.get(step)
        elif isinstance(target, list) and step.isdigit() and int(step) < len(target):
            target = target[int(step)]
        else:
            return None
    return target


def closed(schema: Schema) -> Schema:
    """A copy in which objects that list their properties have no others.

    Every value that fits the copy fits the original; it spares a model from inventing members without end. Schemas
    that are composed of several (allOf, $ref beside properties, unevaluatedProperties) stay open as they are.
    """
    if any("allOf" in node or "unevaluatedProperties" in node for node in walk(schema)):
        return schema
    result: Schema = _mapped(schema, _close)
    return result


def without_formats(schema: Schema, unknown: str) -> Schema:
    """A copy without ``format: unknown``: formats that a validator does not know are annotations, not constraints."""

    def drop(node: Schema) -> Schema:
        return {key: value for key, value in node.items() if not (key == "format" and value == unknown)}

    result: Schema = _mapped(schema, drop)
    return result


def with_options(schema: Schema, **options: object) -> Schema:
    """A copy with these compiler options and none of the client's."""
    return {**schema, OPTIONS_KEY: options}


def _close(node: Schema) -> Schema:
    if isinstance(node.get("properties"), dict) and not any(key in node for key in _OPEN_ENDED):
        return {**node, "additionalProperties": False}
    return node


def _mapped(schema: Any, change: Any) -> Any:
    """``change`` applied to a schema and all inside it, bottom-up, sharing nothing that changes."""
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            result[key] = {name: _mapped(child, change) for name, child in value.items()}
        elif key in _LISTS or key in _SINGLE:
            result[key] = (
                [_mapped(child, change) for child in value] if isinstance(value, list) else _mapped(value, change)
            )
    return change(result)
