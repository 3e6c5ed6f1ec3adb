"""JSON Schemas that no finite text fits, because something required needs itself. llguidance follows such a schema for
ever; everything else that is wrong with one it finds itself.
"""

from collections.abc import Iterator, Mapping
from typing import Any

MOST_PASSES = 32  # each settles what hangs on what is settled
SIMPLE = {"string", "number", "integer", "boolean", "null"}  # values that end by themselves


def is_endless(schema: Any) -> bool:
    """Whether every value would have to hold another one of the same kind, without end."""
    if not isinstance(schema, Mapping):
        return False
    nodes = list(_reachable(schema))[::-1]  # what is inside comes first
    finite: set[int] = set()
    for _ in range(MOST_PASSES):
        before = len(finite)
        for node in nodes:
            if id(node) not in finite and _ends(node, schema, finite):
                finite.add(id(node))
        if id(schema) in finite:
            return False
        if len(finite) == before:
            return True
    return False


def _reachable(root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every schema that `root` leads to, each once."""
    left, seen = [root], {id(root)}
    while left:
        node = left.pop()
        yield node
        for inner in _parts(node, root):
            if isinstance(inner, Mapping) and id(inner) not in seen:
                seen.add(id(inner))
                left.append(inner)


def _ends(node: Any, root: Mapping[str, Any], finite: set[int]) -> bool:
    """Whether a value of this schema can end, as far as is known of its parts."""

    def known(part: Any) -> bool:
        return not isinstance(part, Mapping) or id(part) in finite

    if "const" in node or "enum" in node:
        return True
    if "$ref" in node and not known(_target(node["$ref"], root)):
        return False
    if not all(map(known, _list(node.get("allOf")))):
        return False
    for choice in ("anyOf", "oneOf"):
        if _list(node.get(choice)) and not any(map(known, node[choice])):
            return False
    kinds = node.get("type", [])
    if any(isinstance(kind, str) and kind in SIMPLE for kind in [kinds, *_list(kinds)]):
        return True
    return all(map(known, _required(node)))


def _parts(node: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Any]:
    yield _target(node.get("$ref"), root)
    for name in ("allOf", "anyOf", "oneOf"):
        yield from _list(node.get(name))
    yield from _required(node)


def _required(node: Mapping[str, Any]) -> Iterator[Any]:
    """What an object or array of this schema cannot be without."""
    properties = node.get("properties")
    for key in _list(node.get("required")):
        if isinstance(properties, Mapping) and isinstance(key, str):
            yield properties.get(key)
    least = node.get("minItems", 0)
    first = _list(node.get("prefixItems"))
    if isinstance(least, int | float) and least > 0:
        yield from first[: int(min(least, len(first)))]
        if least > len(first):
            yield node.get("items")


def _target(reference: Any, root: Mapping[str, Any]) -> Any:
    """Of a reference into the schema itself; None for others."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
