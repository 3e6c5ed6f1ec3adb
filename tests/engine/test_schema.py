"""Schemas that no finite text fits are told from those that merely refer to themselves."""

import time
from typing import Any

import pytest

from services.engine.schema import is_endless

NODE = {"type": "object", "properties": {"value": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["value"]}
DEFS: dict[str, Any] = {
    "leaf": {"type": "string"},
    "loop": {"type": "object", "properties": {"a": {"$ref": "#/$defs/loop"}}, "required": ["a"]},
    "one": {"$ref": "#/$defs/other"},
    "other": {"$ref": "#/$defs/one"},
    "a/b": {"type": "array", "items": {"$ref": "#/$defs/a~1b"}, "minItems": 1},
}

FINITE: dict[str, Any] = {
    "anything": {},
    "no schema": [],
    "true": True,
    "a list of nodes": NODE,
    "required, but may be null": {**NODE, "required": ["next"], "properties": {"next": {"type": ["object", "null"]}}},
    "a way out": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/leaf"}], "$defs": DEFS},
    "an optional loop": {"type": "object", "properties": {"x": {"$ref": "#/$defs/loop"}}, "$defs": DEFS},
    "an empty list": {"type": "array", "items": {"$ref": "#"}},
    "a list that ends": {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1},
    "a constant": {"const": 1, "$ref": "#"},
    "nothing there": {"$ref": "#/$defs/none"},
    "somewhere else": {"$ref": "http://example.com"},
    "odd types": {"type": 5, "required": [1], "minItems": "x", "anyOf": 3, "properties": []},
    "odder ones": {
        "type": [{}, 5, []],
        "minItems": float("inf"),
        "prefixItems": [{}],
        "items": [],
        "required": [{}, []],
    },
}
ENDLESS: dict[str, Any] = {
    "itself": {"$ref": "#"},
    "a required loop": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
    "two that need each other": {"$ref": "#/$defs/one", "$defs": DEFS},
    "a loop inside": {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/loop"}},
        "required": ["x"],
        "$defs": DEFS,
    },
    "no way out": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/one"}], "$defs": DEFS},
    "both of two": {"allOf": [{"$ref": "#/$defs/leaf"}, {"$ref": "#/$defs/loop"}], "$defs": DEFS},
    "a list of itself": {"$ref": "#/$defs/a~1b", "$defs": DEFS},
}


@pytest.mark.parametrize("name", [*FINITE, *ENDLESS])
def test_it_is_told(name: str) -> None:
    assert is_endless({**FINITE, **ENDLESS}[name]) == (name in ENDLESS)


def test_large_ones_take_no_time() -> None:
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(20_000)} | {"d20000": {"type": "integer"}}
    backwards = dict(reversed(chain.items()))
    began = time.perf_counter()
    for defs in (chain, backwards):
        assert not is_endless({"$ref": "#/$defs/d0", "$defs": defs})
    assert time.perf_counter() - began < 5
