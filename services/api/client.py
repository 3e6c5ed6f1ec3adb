"""The engine as the api sees it: gRPC channels, Info, one generation as a typed stream. Owns addresses, timeouts and
the translation of gRPC failures; knows no text and no HTTP."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.api.errors import CODE_KEY, RETRY_AFTER_KEY, ApiError, EngineFailed, EngineLost, from_engine
from services.api.writing import Writing
from services.rpc import engine_pb2 as pb
from services.rpc.engine_pb2_grpc import EngineStub
from services.unbroken import Reads, is_ending

log = logging.getLogger(__name__)

INFO_TIMEOUT_S = 2.0
INFO_AGE_S = 5.0
FAILED_S = 5.0  # how long one that failed is asked after the others
ADMISSION_S = 1.0  # an engine says at once whether it takes a request in; after this a stream begins anyway
FORM_S = 15.0  # the same, where it works out a grammar before
ENDING_S = 1.0  # longest wait for why the engine has ended a call; it has said so by then
CHANNEL_OPTIONS = [
    ("grpc.keepalive_time_ms", 20_000),  # a machine that vanished is noticed without traffic
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


@contextmanager
def _translated() -> Iterator[None]:
    """gRPC failures as ApiError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _api_error(error.code(), error.details(), error.trailing_metadata()) from error


def _api_error(status: grpc.StatusCode, details: str | None, trailing: Any) -> ApiError:
    told = {key: value for key, value in trailing or () if isinstance(value, str)}
    return from_engine(status, details or "", told.get(CODE_KEY), told.get(RETRY_AFTER_KEY))


class Engine:
    """One address. `info` may be a few seconds old."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = EngineStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._info: pb.InfoResponse | None = None
        self._asked = 0.0
        self._failed_at = float("-inf")

    @property
    def failed_lately(self) -> bool:
        return time.monotonic() - self._failed_at < FAILED_S

    async def info(self, age_s: float = INFO_AGE_S) -> pb.InfoResponse:
        """Raises EngineLost or another ApiError."""
        if self._info is None or time.monotonic() - self._asked > age_s:
            self.forget_info()
            try:
                with _translated():
                    self._info = await self._stub.Info(pb.InfoRequest(), timeout=INFO_TIMEOUT_S)
            except ApiError:
                self.note_failure()
                raise
            self._asked, self._failed_at = time.monotonic(), float("-inf")
        return self._info

    def forget_info(self) -> None:
        self._info = None

    def note_failure(self) -> None:
        """It is gone, or seems to be."""
        self._info = None
        self._failed_at = time.monotonic()

    async def serving(self) -> bool:
        """What the engine's own health service says."""
        with _translated():
            answer = await self._health.Check(health_pb2.HealthCheckRequest(), timeout=INFO_TIMEOUT_S)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def vision(self, messages: AsyncIterator[pb.VisionIn], timeout_s: float) -> pb.VisionOut:
        """One Vision call: an ask, and the bytes of pictures. Raises ApiError."""
        call = self._stub.Vision(timeout=timeout_s)
        try:
            with _translated():
                writing = Writing(call)
                async for message in messages:
                    if not await writing.say(message):
                        break  # it needs no more of them to refuse them
                else:
                    await writing.end()
                out: pb.VisionOut = await call
        finally:
            call.cancel()
        return out

    def generate(self, timeout_s: float) -> "Generation":
        return Generation(self._stub.Generate(timeout=timeout_s), self)

    async def close(self) -> None:
        await self._channel.close(grace=None)


class Generation:
    """One Generate call. Iterate for the engine's messages; every failure is an ApiError. `cancel` frees the sequence
    and is safe at any time."""

    def __init__(self, call: Any, engine: Engine) -> None:  # grpc.aio's own types are not published
        self._call = call
        self._engine = engine
        self._ahead: pb.GenerateOut | None = None  # read, and not yet told
        self._reads = Reads(call.read)
        self._writing = Writing(call)
        self._given_up = False

    async def start(self, start: pb.Start) -> None:
        """Send the request and wait until the engine has taken it in or refused it."""
        await self._write(pb.GenerateIn(start=start))
        admitted = asyncio.ensure_future(self._call.initial_metadata())
        try:
            await asyncio.wait({admitted}, timeout=FORM_S if start.HasField("grammar") else ADMISSION_S)
        finally:
            admitted.cancel()
        if self._call.done() and await self._call.code() is not grpc.StatusCode.OK:
            raise await self._error()

    async def messages(self) -> AsyncIterator[pb.GenerateOut]:
        """Until the engine ends the call. Raises its error."""
        while True:
            if self._ahead is not None:
                message, self._ahead = self._ahead, None
                yield message
                continue
            async with self._translated():
                message = await self._reads.next()
            if message is grpc.aio.EOF:  # type: ignore[attr-defined]
                # A call that failed between two reads looks like an end.
                if await self._call.code() is not grpc.StatusCode.OK:
                    raise await self._error()
                return
            yield message

    async def send_payload(self, chunks: AsyncIterator[bytes]) -> int:
        """The payload the engine asked for; returns the number of chunks sent."""
        index = 0
        async for chunk in chunks:
            await self._write(pb.GenerateIn(chunk=pb.SnapshotChunk(index=index, data=chunk)))
            index += 1
        return index

    async def lend(self, lent: pb.Lent) -> None:
        """A connection on which the payload comes that the engine asked for."""
        await self._write(pb.GenerateIn(lent=lent))

    async def lent(self) -> pb.Restore:
        """How it went, by the engine's next word: `messages` will tell it again, unless chunks are wanted instead."""
        async for message in self.messages():
            if message.restore.source != pb.Restore.SEND:
                self._ahead = message
            return message.restore
        raise EngineFailed("the engine ended the call while a state was restored")

    async def say_unavailable(self) -> None:
        """The payload the engine asked for cannot be had."""
        await self._say(pb.GenerateIn(unavailable=pb.Unavailable()))

    async def want(self, own_part: bool, blocks: Sequence[int]) -> None:
        """What the engine shall send of the snapshot whose head came last. Raises if it cannot be told any more."""
        await self._write(pb.GenerateIn(want=pb.Want(own_part=own_part, blocks=blocks)))

    async def stop(self) -> bool:
        """End the answer now; Finish and the snapshots follow. False if nothing can be said to the engine any more."""
        return await self._say(pb.GenerateIn(stop=pb.Stop()))

    async def stop_thinking(self) -> bool:
        """End the thinking now; the answer follows. False if nothing can be said to the engine any more."""
        return await self._say(pb.GenerateIn(stop_thinking=pb.StopThinking()))

    async def _say(self, message: pb.GenerateIn) -> bool:
        if self._call.done():
            return False
        try:
            async with self._translated():
                return await self._writing.say(message)
        except ApiError:
            return False

    def cancel(self) -> None:
        self._given_up = True
        self._call.cancel()

    async def _write(self, message: pb.GenerateIn) -> None:
        """For who reads, too: raises what the engine has ended the call with."""
        async with self._translated():
            said = await self._writing.say(message)
            if not said:
                with suppress(TimeoutError):
                    async with asyncio.timeout(ENDING_S):
                        while await self._reads.next() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                            pass
        if not said:
            raise await self._error()

    @asynccontextmanager
    async def _translated(self) -> AsyncIterator[None]:
        """Whatever comes of a call that has ended, as the ApiError that says why. A task that waits for a call which
        another gives up sees a cancellation that is not its own."""
        try:
            yield
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._error() from error
        except asyncio.CancelledError as error:
            if is_ending():
                raise
            raise await self._error() from error

    async def _error(self) -> ApiError:
        call = self._call
        if self._given_up:
            return EngineFailed("the call to the engine was given up")
        if not call.done():
            error: ApiError = EngineLost("the engine hears no more, and does not say why: try again shortly")
        else:
            error = _api_error(await call.code(), await call.details(), await call.trailing_metadata())
        if isinstance(error, EngineLost):
            self._engine.note_failure()
        return error
