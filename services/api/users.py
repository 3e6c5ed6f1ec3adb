"""Whose request it is: users take turns at the engine. Owns how they are told apart; the engine sees a hash."""

import hashlib
from dataclasses import dataclass

from fastapi import Request

OPEN_WEBUI_USER = "x-openwebui-user-id"  # sent if it is told to forward who its user is


@dataclass(frozen=True)
class Caller:
    request_id: str
    user: str


def caller_of(request: Request, named: str | None) -> Caller:
    """By API key, and then by the user that the client names, or else by its address: all may share one key."""
    headers = request.headers
    key = headers.get("authorization") or headers.get("x-api-key") or ""
    who = named or headers.get(OPEN_WEBUI_USER) or (request.client.host if request.client else "")
    return Caller(request.state.request_id, hashlib.sha256(f"{key}\0{who}".encode()).hexdigest()[:16])
