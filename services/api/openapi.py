"""The published OpenAPI document: what every endpoint takes and how it fails. Owns what FastAPI cannot know, since
routes read their bodies themselves; a body's fields are where it is checked.
"""

import functools
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from services.api.middleware import ANTHROPIC, KEYED

COMPONENTS = "#/components/schemas/"
ERROR = "Error"
ANTHROPIC_ERROR = "AnthropicError"
KEY = "key"


def publish(app: FastAPI) -> None:
    """Let /openapi.json tell it. It is made when somebody asks."""
    app.openapi = functools.cache(lambda: _document(app))  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = document.setdefault("components", {})
    schemas = {ERROR: _error(), ANTHROPIC_ERROR: _anthropic_error()}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _describe(path, operation)
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            for name, schema in body.pop("$defs", {}).items():
                assert schemas.setdefault(name, schema) == schema, f"two schemas are called {name}"
    components["schemas"] = schemas
    components["securitySchemes"] = {KEY: {"type": "http", "scheme": "bearer"}}
    return document


def _describe(path: str, operation: dict[str, Any]) -> None:
    """Failures in the shape of the path's API, streams, and the key."""
    name = ANTHROPIC_ERROR if path.startswith(ANTHROPIC) else ERROR
    content = {"application/json": {"schema": {"$ref": COMPONENTS + name}}}
    responses = operation["responses"]
    responses.pop("422", None)  # FastAPI's own; nothing here answers it
    responses["4XX"] = {"description": "what is wrong with the request", "content": content}
    responses["5XX"] = {"description": "what is wrong with the server or the engine", "content": content}
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if "stream" in body.get("properties", {}):
        responses["200"]["content"]["text/event-stream"] = {}
    if path == "/metrics":
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    if path.startswith(KEYED):
        operation["security"] = [{KEY: []}, {}]


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


def _error() -> dict[str, Any]:
    text, maybe = {"type": "string"}, {"type": ["string", "null"]}
    return _object(error=_object(message=text, type=text, param=maybe, code=maybe))


def _anthropic_error() -> dict[str, Any]:
    text = {"type": "string"}
    return _object(type={"const": "error"}, error=_object(type=text, message=text))
