"""What holds for every request, before and behind its route: an id, a bearer key, a largest body, a log line, a count.
Owns no route and reads no body."""

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.errors import ApiError, BodyTooLarge, Unauthorized
from services.api.logs import EXTRA
from services.api.metrics import Metrics

log = logging.getLogger("services.api.access")

REQUEST_ID = "X-Request-Id"
_ID_SHAPE = re.compile(r"[A-Za-z0-9._-]{1,128}")  # a client's own id is kept if it is safe to log
ANTHROPIC = "/v1/messages"  # begins the paths of Anthropic's API
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
KEYED = ("/v1", "/tokenize", "/detokenize", "/apply-template")  # begin the paths that need the key
DRAINED_BYTES = 256 * 1024 * 1024  # of a body that is too large: read to its end, so that the client reads our answer


def error_response(error: ApiError, path: str) -> JSONResponse:
    """In the shape that clients of this path know."""
    body = error.anthropic_body() if path.startswith(ANTHROPIC) else error.body()
    return JSONResponse(body, error.status, error.headers())


class Observed:
    """Outermost: request id, log line, counts, and an answer where our own code failed. `on_error` turns any failure
    into the error to tell."""

    def __init__(self, app: ASGIApp, metrics: Metrics, on_error: Callable[[Exception], ApiError]) -> None:
        self._app = app
        self._metrics = metrics
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        offered = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = offered if _ID_SHAPE.fullmatch(offered) else secrets.token_hex(16)
        began = time.perf_counter()
        scope.setdefault("state", {}).update(request_id=request_id, began=began)
        status = 499  # nothing was sent: the client had gone

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            found = self._on_error(error)
            if status == 499:
                await error_response(found, scope["path"])(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in METHODS else "other"  # a client may invent some
            self._metrics.http.labels(route, method, str(status)).inc()
            fields = {
                "request_id": request_id,
                "method": method,
                "route": route,
                "status": status,
                "seconds": round(time.perf_counter() - began, 4),
            }
            level = logging.DEBUG if route in ("/health", "/ready", "/metrics") else logging.INFO
            log.log(level, "request", extra={EXTRA: fields})


class Guarded:
    """Refuses requests without the key, and bodies that are too large, before anything reads them."""

    def __init__(self, app: ASGIApp, api_key: str, max_body_bytes: int, metrics: Metrics) -> None:
        self._app = app
        self._key_digest = hashlib.sha256(api_key.encode()).digest() if api_key else None
        self._max_body_bytes = max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            self._check_key(request)
            length = request.headers.get("content-length", "")
            if length.isdecimal() and int(length) > self._max_body_bytes:
                await _drain(receive)
                raise self._too_large()
        except ApiError as error:
            self._metrics.errors[error.code,].inc()
            await error_response(error, scope["path"])(scope, receive, send)
            return
        seen = 0

        async def receive_counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body_bytes:
                if message.get("more_body", False):
                    await _drain(receive)
                raise self._too_large()
            return message

        await self._app(scope, receive_counted, send)

    def _check_key(self, request: Request) -> None:
        if self._key_digest is None or not request.url.path.startswith(KEYED):
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if not token:  # Anthropic's clients have a header of their own
            scheme, token = "bearer", request.headers.get("x-api-key", "")
        # Hashes of equal length: the comparison takes the same time whatever was sent.
        given = hashlib.sha256(token.strip().encode()).digest()
        if not hmac.compare_digest(given, self._key_digest) or scheme.lower() != "bearer":
            raise Unauthorized("a valid API key is needed: send the header Authorization: Bearer KEY")

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than this server takes ({self._max_body_bytes} bytes)")


async def _drain(receive: Receive) -> None:
    read = 0
    while read < DRAINED_BYTES:
        message = await receive()
        read += len(message.get("body", b""))
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return
