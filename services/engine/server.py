"""gRPC: the service, health, reflection, and which status each of the engine's errors is. Owns the listening socket.

On asyncio, not on a pool of threads: a call that waits in the queue or for a slow client costs no thread, so no number
of them keeps Info and health from answering; and a client that goes away cancels its call's task. Nothing on the loop
computes: the engine has its own thread, and events come over by `call_soon_threadsafe`.
"""

import asyncio
import logging
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.engine import errors
from services.engine.call import Call, Context
from services.engine.engine import Engine
from services.engine.errors import EngineError, StoppingError
from services.engine.messages import info_message
from services.engine.vision import call as vision_call
from services.rpc import engine_pb2 as pb
from services.rpc import engine_pb2_grpc
from services.settings import SettingError
from services.unbroken import Reads

log = logging.getLogger(__name__)

CODE_KEY = "thimble-code"  # trailing metadata: the error's stable code
RETRY_AFTER_KEY = "thimble-retry-after-s"  # beside it: whole seconds until there will probably be room
INTERNAL_CODE = "internal"  # an exception that is a bug of ours
MOST_MESSAGE_BYTES = 4 << 20  # a Start with a million ids, or a chunk of 1 MiB
STOP_GRACE_S = 2.0  # for answers that are complete but not yet delivered
SERVICE = pb.DESCRIPTOR.services_by_name["Engine"].full_name

STATUS: dict[type[EngineError], grpc.StatusCode] = {
    errors.EngineError: grpc.StatusCode.INTERNAL,
    errors.CheckpointError: grpc.StatusCode.INTERNAL,
    errors.StoreError: grpc.StatusCode.DATA_LOSS,
    errors.TraceError: grpc.StatusCode.INTERNAL,
    errors.DiskError: grpc.StatusCode.INTERNAL,
    errors.MemoryPlanError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.DeviceError: grpc.StatusCode.UNAVAILABLE,
    errors.OutOfPagesError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.PayloadError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.TransferError: grpc.StatusCode.ABORTED,
    errors.RequestError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.IdsError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ContextError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.SamplingError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PositionError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.GrammarError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.StreamError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PictureError: grpc.StatusCode.INVALID_ARGUMENT,
    errors.PictureGoneError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.UnsupportedError: grpc.StatusCode.UNIMPLEMENTED,
    errors.QueueFullError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.CancelledError: grpc.StatusCode.CANCELLED,
    errors.StepError: grpc.StatusCode.INTERNAL,
    errors.StoppingError: grpc.StatusCode.UNAVAILABLE,
}

OPTIONS = [
    ("grpc.so_reuseport", 0),  # else a second engine on the same port would silently take half of the calls
    ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MOST_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),  # a client whose machine vanished is noticed, and its sequence freed
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]


class EngineService(engine_pb2_grpc.EngineServicer):  # type: ignore[misc]  # generated code has no types
    """Without an engine (while it loads) every call is UNAVAILABLE."""

    def __init__(self, snapshot_timeout_s: float) -> None:
        self.engine: Engine | None = None
        self._snapshot_timeout_s = snapshot_timeout_s

    async def Generate(self, request_iterator: Any, context: Context) -> None:
        async with _errors_as_status(context):
            await Call(self._loaded(), context, self._snapshot_timeout_s).run()

    async def Vision(self, request_iterator: Any, context: Context) -> pb.VisionOut:
        async with _errors_as_status(context):
            return await vision_call.answer(self._loaded(), Reads(context.read))

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        async with _errors_as_status(context):
            return info_message(self._loaded().info)

    def _loaded(self) -> Engine:
        if self.engine is None:
            raise StoppingError("the engine is loading its model: ask again in a moment")
        return self.engine


@asynccontextmanager
async def _errors_as_status(context: Context) -> AsyncIterator[None]:
    """The one place where an exception becomes a status."""
    try:
        yield
    except EngineError as error:
        traceback.clear_frames(error.__traceback__)  # grpc keeps what is raised here in a cycle, but not the prompt
        retry_after_s = getattr(error, "retry_after_s", None)
        more = () if retry_after_s is None else ((RETRY_AFTER_KEY, str(retry_after_s)),)
        await _abort(context, STATUS[type(error)], error.code, str(error), more)
    except Exception as error:
        if not isinstance(error, grpc.aio.BaseError):
            log.exception("a call failed in a way that has no name")
            await _abort(context, grpc.StatusCode.INTERNAL, INTERNAL_CODE, f"a bug in the engine: {error!r}")
        raise


async def _abort(
    context: Context, status: grpc.StatusCode, code: str, message: str, more: tuple[tuple[str, str], ...] = ()
) -> NoReturn:
    await context.abort(status, message, ((CODE_KEY, code), *more))
    raise AssertionError("abort raises")


class Server:
    """Made inside a running loop; listens until `stop`. Health says SERVING only while there is an engine."""

    def __init__(self, host: str, port: int, snapshot_timeout_s: float) -> None:
        """Port 0 takes any free one. Raises SettingError if the address cannot be listened on."""
        self._service = EngineService(snapshot_timeout_s)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server = grpc.aio.server(options=OPTIONS)
        engine_pb2_grpc.add_EngineServicer_to_server(self._service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        address = f"[{host}]" if ":" in host else host
        try:
            self.port = self._server.add_insecure_port(f"{address}:{port}")
        except RuntimeError as error:
            raise SettingError(
                f"gRPC cannot listen on {host}:{port}: another process may have it; set THIMBLE_ENGINE_HOST and _PORT"
            ) from error

    async def start(self) -> None:
        await self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._server.start()

    async def serve(self, engine: Engine) -> None:
        """Take calls for this engine from now on."""
        self._service.engine = engine
        await self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, timeout_s: float) -> None:
        """Say NOT_SERVING, let the engine end its answers within `timeout_s`, deliver them, and close the socket."""
        await self._health.enter_graceful_shutdown()
        if self._service.engine is not None:
            await asyncio.to_thread(self._service.engine.close, timeout_s)
        await self._server.stop(STOP_GRACE_S)

    async def _set_health(self, status: Any) -> None:
        for name in (health.OVERALL_HEALTH, SERVICE):
            await self._health.set(name, status)
