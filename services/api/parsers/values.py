"""A tool parameter's text to JSON, by the parameter's schema. Owns no parsing of calls.

Text that does not fit its schema becomes a string: the tool then says what is wrong, which the model can read.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

MOST_REFERENCES = 16  # that lead to one another

_INTEGER = re.compile(r"-?(0|[1-9]\d*)\Z")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?\Z")


def is_plain_string(schema: Any) -> bool:
    """Whether a parameter's text is its value as it stands; so it is without a schema too."""
    return types_of(schema) <= {"string"}


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema that a `$ref` into `root` stands for, with what is written beside it; others as they are."""
    for _ in range(MOST_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            return schema
        schema = {**found, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema


def types_of(schema: Any) -> set[str]:
    """The JSON types that a schema allows, as far as it says; empty if it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    declared = schema.get("type")
    found = {declared} if isinstance(declared, str) else {t for t in _list(declared) if isinstance(t, str)}
    for choice in ("anyOf", "oneOf", "allOf"):
        for inner in _list(schema.get(choice)):
            found |= types_of(inner)
    if not found and isinstance(schema.get("enum"), list):
        found = {_type_name(value) for value in schema["enum"]}
    return found


def to_json(text: str, schema: Any) -> str:
    """JSON text for a complete value."""
    types = types_of(schema)
    bare = text.strip()
    if "null" in types and bare in ("null", "None"):
        return "null"
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    if "integer" in types and _INTEGER.match(bare):
        return bare
    if "number" in types and _NUMBER.match(bare):
        return bare
    if types & {"object", "array"}:
        try:
            value = json.loads(bare, parse_constant=_refuse)
        except (ValueError, RecursionError):
            value = ""
        if isinstance(value, dict | list) and _type_name(value) in types:
            return dump(value)
    if "integer" in types and re.fullmatch(r"-?\d+\.0+", bare):
        return str(int(bare.partition(".")[0]))
    return dump(text)


def dump(value: Any) -> str:
    """JSON text that can be sent as UTF-8: half a surrogate pair, which a model can write as an escape, stays one."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text) else json.dumps(value)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _type_name(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", dict: "object", list: "array", type(None): "null"}
    return names[type(value)]
