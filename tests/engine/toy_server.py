"""The real gRPC server in a thread of its own, around a toy engine or around none."""

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from toy_engine import Toy

from services.engine.engine import Engine
from services.engine.server import Server
from services.rpc import engine_pb2 as pb
from services.rpc.engine_pb2_grpc import EngineStub


@dataclass
class Running:
    """`do` runs a coroutine on the server's loop and waits for it."""

    server: Server
    loop: asyncio.AbstractEventLoop

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout=30)


@contextmanager
def serving(engine: Engine | None, snapshot_timeout_s: float = 20.0) -> Iterator[Running]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def make() -> Server:
        server = Server("127.0.0.1", 0, snapshot_timeout_s)
        await server.start()
        if engine is not None:
            await server.serve(engine)
        return server

    running = Running(asyncio.run_coroutine_threadsafe(make(), loop).result(timeout=30), loop)
    try:
        yield running
    finally:
        running.do(running.server.stop(0.0))
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=30)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


@contextmanager
def channel_to(running: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(running.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


@dataclass
class Stream:
    """A Generate call from a client: `send` what goes in, iterate for what comes out."""

    channel: grpc.Channel
    outbox: "queue.Queue[pb.GenerateIn | None]" = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        self.call: Any = EngineStub(self.channel).Generate(iter(self.outbox.get, None), timeout=60)

    def send(self, **message: Any) -> None:
        self.outbox.put(pb.GenerateIn(**message))

    def half_close(self) -> None:
        self.outbox.put(None)

    def next(self, kind: str) -> Any:
        """The next message, which must be of this kind."""
        message = next(self.call)
        assert message.WhichOneof("message") == kind, message
        return getattr(message, kind)

    def until(self, kind: str) -> Any:
        """The next message of this kind; others are passed over."""
        for message in self.call:
            if message.WhichOneof("message") == kind:
                return getattr(message, kind)
        raise AssertionError(f"the stream ended without {kind}")

    def rest(self) -> list[pb.GenerateOut]:
        return list(self.call)

    def error(self) -> grpc.RpcError:
        """How the call failed."""
        try:
            list(self.call)
        except grpc.RpcError as error:
            return error
        raise AssertionError("the call ended well")


def code_of(error: Any) -> str | None:
    return dict(error.trailing_metadata()).get("thimble-code")


def start(*ids: int, max_tokens: int = 6, **more: Any) -> pb.Start:
    return pb.Start(request_id="r", ids=ids, max_tokens=max_tokens, **more)


__all__ = ["Running", "Stream", "Toy", "channel_to", "code_of", "serving", "start"]
