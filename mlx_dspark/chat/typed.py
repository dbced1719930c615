"""An argument that a syntax writes as bare text, as the value that the tool's JSON schema asks for."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "array": (list,),
    "object": (dict,),
}
_ALSO = {"str": "string", "text": "string", "int": "integer", "float": "number", "bool": "boolean"} | {
    "dict": "object",
    "list": "array",
}
_CONTAINERS = frozenset({"array", "object"})


def typed(raw: str, schema: Any, root: Any = None) -> Any:
    """The value of `raw` in the first of the schema's types that it can be read as; else the text itself.

    Where the schema says nothing of a type, text that is a JSON object or array is read as one. `root` holds
    what the schema refers to by `#/...`.
    """
    types = _types(schema, root, 0)
    if types is None:
        types = _CONTAINERS | {"string"}
    for value in _readings(raw):
        if any(_is(value, name) for name in types if name in _TYPES):
            return int(value) if isinstance(value, float) and "number" not in types else value
    return raw


def arguments_of(raw: Mapping[str, str], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call, each by its property in the schema of the arguments."""
    properties = parameters.get("properties")
    known = properties if isinstance(properties, Mapping) else {}
    return {name: typed(text, known.get(name), parameters) for name, text in raw.items()}


def _readings(raw: str) -> list[Any]:
    """What the text may mean: as JSON, then as Python writes it."""
    text = raw.strip()
    found: list[Any] = []
    for read in (_json, ast.literal_eval):
        try:
            found.append(read(text))
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    if text.lower() in ("true", "false"):
        found.append(text.lower() == "true")
    return found


def _json(text: str) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    return json.loads(text, strict=False, parse_constant=refuse)


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _types(schema: Any, root: Any, depth: int) -> frozenset[str] | None:
    """The names of the types that a schema admits; None where it names none."""
    if not isinstance(schema, Mapping) or depth > 16:
        return None
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_target(reference, root), root, depth + 1)
    named = schema.get("type")
    if named is not None:
        names = named if isinstance(named, list | tuple) else [named]
        return frozenset(_ALSO.get(str(name).lower(), str(name).lower()) for name in names)
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list) and values:
            return frozenset(name for value in values for name in _names(value))
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(parts := schema.get(key), list):
            found = [_types(part, root, depth + 1) for part in parts]
            return frozenset[str]().union(*filter(None, found)) or None
    return None


def _names(value: Any) -> list[str]:
    if isinstance(value, str):
        return ["string"]
    return [name for name in _TYPES if _is(value, name)]


def _target(reference: str, root: Any) -> Any:
    found = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
