"""A read from the engine that nobody waits for any more is not broken off: grpc would keep memory of it for ever."""

import asyncio
from typing import Any, cast

import grpc
import pytest

from services.api.client import Engine, Generation
from services.rpc import engine_pb2 as pb


class Call:
    """One of grpc's: a read ends when `message` is set."""

    def __init__(self) -> None:
        self.message: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.reads = self.broken_off = 0

    async def read(self) -> Any:
        self.reads += 1
        try:
            return await self.message
        except asyncio.CancelledError:
            self.broken_off += 1
            raise

    async def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.OK


def test_who_hangs_up_breaks_no_read_off() -> None:
    async def story() -> None:
        call = Call()
        generation = Generation(call, cast(Engine, None))
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(generation.messages()), 0.01)
        assert (call.reads, call.broken_off) == (1, 0)
        message = pb.GenerateOut()
        call.message.set_result(message)
        assert await anext(generation.messages()) is message, "what came meanwhile is not lost"
        call.message = asyncio.get_running_loop().create_future()
        call.message.set_result(grpc.aio.EOF)  # type: ignore[attr-defined]
        assert [each async for each in generation.messages()] == []
        assert (call.reads, call.broken_off) == (2, 0)

    asyncio.run(story())


def test_a_read_that_is_broken_off_shows() -> None:
    async def story() -> None:
        call = Call()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(call.read(), 0.01)
        assert call.broken_off == 1

    asyncio.run(story())
