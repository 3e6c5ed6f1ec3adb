"""A request body from bytes to a checked object. Owns JSON, limits of depth, and how a wrong field is named; the fields
themselves are in schemas.py and beside it.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from services.api.errors import InvalidRequest, MalformedJson, Unsupported

DEEPEST = 64  # nesting of tools and arguments: templates and parsers walk them recursively

_SURROGATE = re.compile("[\ud800-\udfff]")


def shallow(value: Any) -> Any:
    """The value itself, if it is not nested too deeply to be walked."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return value
    raise PydanticCustomError("too_deep", "nested deeper than {limit} levels", {"limit": DEEPEST})


JsonObject = Annotated[dict[str, Any], BeforeValidator(shallow)]


class Body(BaseModel):
    """Unknown fields are ignored; nothing is converted: "5" is no number."""

    model_config = ConfigDict(strict=True, extra="ignore")


Kind = TypeVar("Kind", bound=BaseModel)


def body_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """For the published OpenAPI document: what an endpoint's body is."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def parse_json(raw: bytes) -> Any:
    """Raises MalformedJson with the place."""
    try:
        return json.loads(raw, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise MalformedJson(f"the body is not JSON: {error.msg} at {place}") from error
    except UnicodeDecodeError as error:
        raise MalformedJson(f"the body is not UTF-8: byte {error.start} is wrong") from error
    except RecursionError as error:
        raise MalformedJson("the body is nested too deeply") from error
    except ValueError as error:  # NaN, or a number of thousands of digits
        raise MalformedJson(f"the body is not JSON: {error}") from error


def validate(kind: type[Kind], data: Any) -> Kind:
    """Raises InvalidRequest or Unsupported for the first thing that is wrong, with the field's name."""
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object")
    _check_text(data)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        # Of a field that may be several things, what got furthest was meant.
        first = max((one for one in found if one["loc"][:1] == found[0]["loc"][:1]), key=lambda one: len(one["loc"]))
        param = _param(kind, first["loc"], first.get("ctx") or {})
        message = first["msg"] if first["msg"].startswith(param) else f"{param}: {first['msg']}"
        raise (Unsupported if first["type"] == "unsupported" else InvalidRequest)(message, param or None) from error


def _check_text(data: Any) -> None:
    """JSON can write half of a surrogate pair, which is no text: tokenizers and templates fail on it in odd ways."""
    left: list[tuple[str, Any]] = [("", data)]
    while left:
        path, value = left.pop()
        if isinstance(value, str):
            if not value.isascii() and _SURROGATE.search(value):
                raise InvalidRequest(f"{path}: half of a surrogate pair is not text", path)
        elif isinstance(value, list):
            left += [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
        elif isinstance(value, dict):
            left += [(path, key) for key in value]
            left += [(f"{path}.{key}" if path else key, inner) for key, inner in value.items()]


def _param(kind: type[BaseModel], loc: tuple[int | str, ...], context: Mapping[str, Any]) -> str:
    """`messages[0].content` from pydantic's location, without the names of union branches that it appends."""
    path = ""
    branches = {"str", "bool", "int", "float"}
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step not in branches and not step.startswith(("list[", "dict[", "function-")):
            path += f".{step}" if path else step
    own = context.get("param", "")
    return own if not path else f"{path}.{own}" if own and own != path else path


def refuse_constant(name: str) -> None:
    """NaN and Infinity, which Python would read, are no JSON."""
    raise ValueError(f"{name} is not allowed")
