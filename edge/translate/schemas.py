"""Questions about a JSON schema that the grammar compiler does not answer, and how we make one ready for it.

A schema here is what a client sent: any JSON. The walk visits only places where a schema stands, so that data (enum,
const, default) is never taken for one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from common.errors import InvalidRequest

MAX_SCHEMA_DEPTH: Final = 64
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE: Final = ("items", "additionalProperties", "additionalItems", "contains", "not", "if", "then", "else")
_OPEN_ENDED: Final = ("additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "$ref")
_LARGEST: Final = 10**18  # a power of ten within 64 bits: one that the compiler's floats hold exactly
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
    """Raises `InvalidRequest` when no finite value fits: a $ref cycle with no way out. Linear in the schema's size.

    References that lead nowhere count as finite here; the compiler refuses them with a better message.
    """
    conditions = _Conditions()
    for node in walk(schema):
        conditions.define(node, schema)
    if not conditions.hold_for(schema):
        raise InvalidRequest(f"{param}: a $ref cycle has no end, so that no finite value can match", param=param)


class _Conditions:
    """The least fixed point of "some finite value fits", over conditions of the kinds all-of and any-of.

    A condition is a number: how many of its parts must hold yet. One that comes to 0 holds, and its users are told.
    """

    def __init__(self) -> None:
        self._missing: list[int] = []
        self._users: list[list[int]] = []
        self._of_schema: dict[int, int] = {}  # by the identity of the schema object

    def define(self, node: Schema, root: Schema) -> None:
        """The condition of one schema, in terms of those inside it and those it refers to."""
        parts = []
        if not ("enum" in node or "const" in node):
            if "$ref" in node:
                parts.append(self._of(_resolve(root, node["$ref"])))
            parts += [self._of(part) for part in _as_list(node.get("allOf"))]
            for key in ("anyOf", "oneOf"):
                if _as_list(node.get(key)):
                    parts.append(self._any([self._of(part) for part in node[key]]))
            parts.append(self._shape(node))
        own = self._of(node)
        self._missing[own] = len(parts)
        self._use(own, parts)

    def hold_for(self, schema: Schema) -> bool:
        """Whether the condition of ``schema`` follows from what holds by itself."""
        holding = [condition for condition, missing in enumerate(self._missing) if missing <= 0]
        for condition in holding:  # grows while it is gone through
            for user in self._users[condition]:
                self._missing[user] -= 1
                if self._missing[user] == 0:
                    holding.append(user)
        return self._missing[self._of(schema)] <= 0

    def _new(self, missing: int) -> int:
        self._missing.append(missing)
        self._users.append([])
        return len(self._missing) - 1

    def _of(self, node: object) -> int:
        """The condition of a schema object; what is no object always fits something."""
        if not isinstance(node, dict):
            return self._new(0)
        if id(node) not in self._of_schema:
            self._of_schema[id(node)] = self._new(1)
        return self._of_schema[id(node)]

    def _use(self, condition: int, parts: Sequence[int]) -> None:
        for part in parts:
            self._users[part].append(condition)

    def _all(self, parts: Sequence[int]) -> int:
        condition = self._new(len(parts))
        self._use(condition, parts)
        return condition

    def _any(self, parts: Sequence[int]) -> int:
        condition = self._new(1)
        self._use(condition, parts)
        return condition

    def _shape(self, node: Schema) -> int:
        """The required members of an object, or the least items of an array; other values are finite by themselves."""
        types = node.get("type")
        kinds = [types] if isinstance(types, str) else _as_list(types)
        if not kinds or any(kind not in ("object", "array") for kind in kinds):
            return self._new(0)
        shapes = []
        if "object" in kinds:
            members = node["properties"] if isinstance(node.get("properties"), dict) else {}
            required = [name for name in _as_list(node.get("required")) if isinstance(name, str)]
            shapes.append(self._all([self._of(members.get(name)) for name in required]))
        if "array" in kinds:
            least = node.get("minItems")
            needed = max(0, int(least)) if isinstance(least, int | float) else 0
            prefix = _as_list(node.get("prefixItems"))
            items = [*prefix[:needed], *([node.get("items")] if needed > len(prefix) else [])]
            shapes.append(self._all([self._of(item) for item in items]))
        return self._any(shapes)


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


def bounded(schema: Schema) -> Schema:
    """A copy in which integers without a bound have at most 19 digits.

    Every value that fits the copy fits the original; it spares a model from writing one number without end.
    """
    result: Schema = _mapped(schema, _bound)
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


def _bound(node: Schema) -> Schema:
    if "integer" not in (_as_list(node.get("type")) or [node.get("type")]) or "enum" in node or "const" in node:
        return node
    low, high = node.get("minimum", node.get("exclusiveMinimum")), node.get("maximum", node.get("exclusiveMaximum"))
    added = {}
    if low is None and (high is None or _is_within(high)):
        added["minimum"] = -_LARGEST
    if high is None and (low is None or _is_within(low)):
        added["maximum"] = _LARGEST
    return {**node, **added}


def _is_within(bound: object) -> bool:
    return isinstance(bound, int | float) and not isinstance(bound, bool) and abs(bound) < _LARGEST


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
