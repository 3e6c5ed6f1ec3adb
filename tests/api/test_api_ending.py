"""How a call to the engine ends when several things happen to it at once: what is told is what the engine said."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import grpc
import pytest

from services.api.client import Engine, Generation
from services.api.errors import ApiError
from services.rpc import engine_pb2 as pb
from services.rpc import engine_pb2_grpc as rpc

CALLS = 60  # one in three to five went wrong
CHUNK_BYTES = 3 << 20  # more than flow control lets through before it is read
TOKEN = pb.GenerateOut(token=pb.Token(id=7))
STOPPING = (grpc.StatusCode.UNAVAILABLE, "stopping", (("thimble-code", "engine_stopping"),))
REFUSED = (grpc.StatusCode.INVALID_ARGUMENT, "bad picture", (("thimble-code", "bad_picture"),))

Behind = Callable[[Any], Awaitable[None]]  # what an engine does behind a Start


class Behaving(rpc.EngineServicer):  # type: ignore[misc]  # generated code has no types
    def __init__(self, behind: Behind) -> None:
        self._behind = behind

    async def Generate(self, request_iterator: Any, context: Any) -> None:
        await context.read()
        await context.send_initial_metadata(())
        await self._behind(context)

    async def Vision(self, request_iterator: Any, context: Any) -> None:
        await context.read()
        await self._behind(context)


def with_engine(behind: Behind, test: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        server = grpc.aio.server()
        rpc.add_EngineServicer_to_server(Behaving(behind), server)
        engine = Engine(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        try:
            await test(engine)
        finally:
            await engine.close()
            await server.stop(0)

    asyncio.run(run())


async def begin(engine: Engine) -> Generation:
    generation = engine.generate(30)
    await generation.start(pb.Start(request_id="r", ids=[1]))
    return generation


async def chunks() -> AsyncIterator[bytes]:
    for _ in range(3):
        yield bytes(CHUNK_BYTES)


async def stuck(generation: Generation) -> "asyncio.Task[str]":
    """Chunks on their way to an engine that does not read."""
    sending = asyncio.create_task(told(generation.send_payload(chunks())))
    while not generation._writing._turn.locked():
        await asyncio.sleep(0)
    return sending


async def told(work: Awaitable[Any]) -> str:
    try:
        await work
    except ApiError as error:
        return f"{error.code}: {error}"
    return "nothing"


def test_two_speak_to_the_engine_at_once() -> None:
    """Somebody has an answer's thinking ended while its snapshot is on its way to the engine."""
    heard: Counter[str] = Counter()
    spoken = asyncio.Event()

    async def listens(context: Any) -> None:
        await spoken.wait()
        while heard.total() < 5:
            heard[(await context.read()).WhichOneof("message")] += 1

    async def both(engine: Engine) -> None:
        generation = await begin(engine)
        sending = await stuck(generation)
        others = [asyncio.create_task(speak()) for speak in (generation.stop_thinking, generation.stop)]
        await asyncio.sleep(0)
        spoken.set()
        assert await asyncio.gather(*others, sending) == [True, True, "nothing"]
        assert [message async for message in generation.messages()] == []

    with_engine(listens, both)
    assert heard == {"chunk": 3, "stop": 1, "stop_thinking": 1}


@pytest.mark.parametrize("unread", [0, 3])
def test_an_engine_stops_while_it_is_sent_a_snapshot(unread: int) -> None:
    sending = asyncio.Semaphore(0)

    async def stops(context: Any) -> None:
        for _ in range(unread):  # what comes behind them is not heard before they are read
            await context.write(TOKEN)
        await sending.acquire()
        await context.abort(*STOPPING)

    async def send(engine: Engine) -> None:
        found: Counter[str] = Counter()
        for _ in range(CALLS):
            generation = await begin(engine)
            sending.release()
            found[await told(generation.send_payload(chunks()))] += 1
            found[await told(anext(generation.messages()))] += 1
            assert not await generation.stop_thinking()
        assert found == {"engine_unavailable: stopping": 2 * CALLS}
        assert not any("_handle_status" in repr(task) for task in asyncio.all_tasks()), "nothing is left of a call"
        assert engine.failed_lately

    with_engine(stops, send)


def test_who_speaks_too_late_ends_nothing() -> None:
    """A slow client's answer is complete in the engine when its thinking is to be ended: all of it is read."""

    async def answers(context: Any) -> None:
        for _ in range(3):
            await context.write(TOKEN)

    async def speak(engine: Engine) -> None:
        generation = await begin(engine)
        while await generation.stop_thinking():
            await asyncio.sleep(0)
        assert [message async for message in generation.messages()] == [TOKEN] * 3
        generation.cancel()

    with_engine(answers, speak)


def test_an_engine_refuses_a_picture_before_all_of_it_has_come() -> None:
    async def refuses(context: Any) -> None:
        await context.abort(*REFUSED)

    async def pieces() -> AsyncIterator[pb.VisionIn]:
        for _ in range(12):
            yield pb.VisionIn(data=bytes(1 << 20))

    async def send(engine: Engine) -> None:
        found = Counter([await told(engine.vision(pieces(), 30)) for _ in range(CALLS)])
        assert found == {"invalid_request: bad picture": CALLS}

    with_engine(refuses, send)


@pytest.mark.parametrize("doing", ["reads", "writes", "asks"])
def test_a_call_that_somebody_else_gives_up_cancels_nobody(doing: str) -> None:
    """The client of an answer leaves while another request has its thinking ended, or has it cancelled."""

    async def is_silent(context: Any) -> None:
        await asyncio.sleep(30)

    async def give_up(engine: Engine) -> None:
        generation = await begin(engine)
        sending = await stuck(generation)
        work = {"reads": lambda: anext(generation.messages()), "writes": lambda: generation.want(True, ())}
        other = asyncio.create_task(told(work.get(doing, generation.stop_thinking)()))
        await asyncio.sleep(0)
        generation.cancel()
        given_up = "engine_failed: the call to the engine was given up"
        assert await asyncio.gather(sending, other) == [given_up, "nothing" if doing == "asks" else given_up]
        assert not engine.failed_lately, "nothing is wrong with the engine"

    with_engine(is_silent, give_up)


def test_who_is_cancelled_himself_is() -> None:
    async def is_silent(context: Any) -> None:
        await asyncio.sleep(30)

    async def leave(engine: Engine) -> None:
        generation = await begin(engine)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await anext(generation.messages())
        sending = await stuck(generation)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        generation.cancel()

    with_engine(is_silent, leave)
