"""The api's exceptions: one tree, each with a stable code, an HTTP status and a body in OpenAI's shape; and the one map
from the engine's failures to them. Owns no handling: app.py turns what is raised into a response.

ApiError                    500
├── InvalidRequest          400  something in the request is wrong; `param` names the field
│   ├── MalformedJson       400
│   ├── Unsupported         400  known, but not built: silence would change the answer
│   ├── ContextTooLong      400
│   ├── TemplateRefused     400  the model's chat template cannot render these messages
│   ├── FormRefused         400  a schema or grammar that is wrong, that nothing fits, or that takes too much
│   └── BodyTooLarge        413
├── Unauthorized            401
├── NotFound                404
│   └── ModelNotFound       404
├── MethodNotAllowed        405
├── QueueFull               429  with Retry-After
│   └── PictureGone         429  with Retry-After
├── EngineLost              503  with Retry-After
├── EngineTimeout           504
├── EngineFailed            500
├── ClientGone              499  nobody reads it; for logs and counts
└── ModelFolderError        500  at start only: the model's text files are missing or not understood
"""

from typing import Any, ClassVar

import grpc

CODE_KEY = "thimble-code"  # trailing metadata of a failed call: the engine's stable code
RETRY_AFTER_KEY = "thimble-retry-after-s"  # beside it: when there will probably be room

ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A failure that a client or operator can cause. The message says what is wrong and what to do."""

    code: ClassVar[str] = "internal_error"
    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    retry_after_s: int | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def body(self) -> dict[str, Any]:
        """The response body, the same as OpenAI's."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The same as Anthropic's."""
        return {"type": "error", "error": {"type": ANTHROPIC_TYPES.get(self.status, "api_error"), "message": str(self)}}

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


class InvalidRequest(ApiError):
    code = "invalid_request"
    status = 400
    type = "invalid_request_error"


class MalformedJson(InvalidRequest):
    code = "malformed_json"


class Unsupported(InvalidRequest):
    code = "unsupported_parameter"


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class TemplateRefused(InvalidRequest):
    code = "template_error"


class FormRefused(InvalidRequest):
    code = "invalid_schema"


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"
    status = 413


class Unauthorized(ApiError):
    code = "invalid_api_key"
    status = 401
    type = "authentication_error"


class NotFound(ApiError):
    code = "not_found"
    status = 404
    type = "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class MethodNotAllowed(ApiError):
    code = "method_not_allowed"
    status = 405
    type = "invalid_request_error"


class QueueFull(ApiError):
    code = "queue_full"
    status = 429
    type = "rate_limit_error"
    retry_after_s = 5


class PictureGone(QueueFull):
    """Others' pictures took its place between the two calls that a request with pictures is."""

    code = "picture_gone"


class EngineLost(ApiError):
    code = "engine_unavailable"
    status = 503
    type = "service_unavailable_error"
    retry_after_s = 2


class EngineTimeout(ApiError):
    code = "engine_timeout"
    status = 504


class EngineFailed(ApiError):
    code = "engine_failed"


class ClientGone(ApiError):
    code = "client_gone"
    status = 499


class ModelFolderError(ApiError):
    code = "bad_model_folder"


# The engine's own codes first: they say more than a gRPC status. Requests that the api built wrongly are its own fault
# (500), not the client's.
BY_ENGINE_CODE: dict[str, type[ApiError]] = {
    "engine_error": EngineFailed,
    "bad_checkpoint": EngineFailed,
    "bad_store": EngineFailed,
    "bad_trace": EngineFailed,
    "device": EngineLost,  # it starts again
    "disk": EngineFailed,
    "memory_plan": EngineFailed,
    "out_of_pages": QueueFull,  # other dialogs hold the memory: it comes back
    "bad_snapshot": EngineFailed,
    "snapshot_transfer": EngineFailed,
    "bad_request": EngineFailed,
    "bad_ids": EngineFailed,
    "context_too_long": ContextTooLong,
    "bad_sampling": InvalidRequest,
    "bad_snapshot_position": EngineFailed,
    "bad_grammar": FormRefused,
    "bad_stream": EngineFailed,
    "bad_picture": InvalidRequest,
    "picture_gone": PictureGone,
    "unsupported": Unsupported,
    "queue_full": QueueFull,
    "cancelled": EngineLost,  # we did not cancel, so the engine is going away
    "step_failed": EngineFailed,
    "engine_stopping": EngineLost,
    "internal": EngineFailed,  # a bug of the engine's
}

BY_STATUS: dict[grpc.StatusCode, type[ApiError]] = {
    grpc.StatusCode.OK: EngineFailed,  # a call that ended well before it had finished its answer
    grpc.StatusCode.CANCELLED: EngineLost,
    grpc.StatusCode.UNKNOWN: EngineFailed,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.DEADLINE_EXCEEDED: EngineTimeout,
    grpc.StatusCode.NOT_FOUND: EngineFailed,
    grpc.StatusCode.ALREADY_EXISTS: EngineFailed,
    grpc.StatusCode.PERMISSION_DENIED: EngineFailed,
    grpc.StatusCode.UNAUTHENTICATED: EngineFailed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: QueueFull,
    grpc.StatusCode.FAILED_PRECONDITION: EngineFailed,
    grpc.StatusCode.ABORTED: EngineFailed,
    grpc.StatusCode.OUT_OF_RANGE: ContextTooLong,
    grpc.StatusCode.UNIMPLEMENTED: Unsupported,
    grpc.StatusCode.INTERNAL: EngineFailed,
    grpc.StatusCode.UNAVAILABLE: EngineLost,
    grpc.StatusCode.DATA_LOSS: EngineFailed,
}


def from_engine(
    status: grpc.StatusCode, details: str, engine_code: str | None, retry_after_s: str | None = None
) -> ApiError:
    """What a failed call means to our client. An engine newer than this api may send codes that are not in the map."""
    kind = BY_ENGINE_CODE.get(engine_code or "") or BY_STATUS[status]
    if kind is EngineLost and engine_code is None:
        return EngineLost("the engine cannot be reached; it may be starting: try again shortly")
    if kind is EngineTimeout:
        return EngineTimeout("the answer took longer than this server allows (request_timeout_s)")
    error = kind(details or f"the engine answered {status.name}")
    if kind.retry_after_s is not None and retry_after_s is not None and retry_after_s.isdecimal():
        error.retry_after_s = int(retry_after_s)
    return error


def all_errors() -> list[type[ApiError]]:
    """The whole tree, for tests and documents."""
    found: list[type[ApiError]] = [ApiError]
    for kind in found:
        found.extend(kind.__subclasses__())
    return found
