"""No operation of gRPC's is broken off by the engine, however a call ends: grpc would keep memory of it for ever."""

import asyncio
import queue
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import ModuleType
from typing import Any

import grpc
import pytest
from toy_engine import CONFIG, soon, toy
from toy_server import Stream, channel_to, serving, start

from services.engine import call as engine_call
from services.engine import server
from services.engine.engine import Engine
from services.engine.vision import call as vision_call
from services.rpc.engine_pb2_grpc import EngineStub

PROMPT = (1, 2, 3, 4, 5) * 5
LONG = 900  # tokens: it is still under way when its client goes
SNAPSHOT_BYTES = 8 << 20  # more than any window of flow control
LARGE = replace(CONFIG, mamba_state=SNAPSHOT_BYTES // 128)


class Counted:
    """A call's context that counts what is asked of gRPC, and how it ends."""

    begun = ended = broken_off = given_up = 0  # of all calls

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        Counted.given_up += name == "abort"
        found = getattr(self._context, name)
        return self._counting(found) if name in ("read", "write", "send_initial_metadata") else found

    @staticmethod
    def _counting(operation: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def counted(*message: Any) -> Any:
            Counted.begun += 1
            try:
                return await operation(*message)
            except asyncio.CancelledError:
                Counted.broken_off += 1
                raise
            finally:
                Counted.ended += 1

        return counted


class Broken:
    """Reads as they would be without `services.unbroken`."""

    def __init__(self, read: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self.next = read


async def broken(operation: Coroutine[Any, Any, Any]) -> Any:
    return await operation


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("begun", "ended", "broken_off", "given_up"):
        monkeypatch.setattr(Counted, name, 0)
    for name in ("Generate", "Vision"):
        method = getattr(server.EngineService, name)

        async def method_counted(self: Any, requests: Any, context: Any, method: Any = method) -> Any:
            return await method(self, requests, Counted(context))

        monkeypatch.setattr(server.EngineService, name, method_counted)
    monkeypatch.setattr(Engine, "sight", None)  # none is asked: no picture comes


def let_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (engine_call, server):
        monkeypatch.setattr(module, "Reads", Broken)
    monkeypatch.setattr(engine_call, "unbroken", broken)


def ends_first(channel: grpc.Channel) -> None:
    """The answer is whole before its client has said its last."""
    stream = Stream(channel)
    stream.send(start=start(*PROMPT))
    stream.rest()
    stream.half_close()


def hangs_up(channel: grpc.Channel) -> None:
    stream = Stream(channel)
    stream.send(start=start(*PROMPT, max_tokens=LONG))
    stream.until("token")
    stream.call.cancel()
    stream.half_close()


def says_nothing(channel: grpc.Channel) -> None:
    stream = Stream(channel)
    assert stream.error().code() is grpc.StatusCode.INVALID_ARGUMENT
    stream.half_close()


def is_refused(channel: grpc.Channel) -> None:
    stream = Stream(channel)
    stream.send(start=start(*PROMPT, max_tokens=LONG))
    stream.until("token")
    stream.send(start=start(*PROMPT))
    assert stream.error().code() is grpc.StatusCode.INVALID_ARGUMENT
    stream.half_close()


def sends_no_picture(channel: grpc.Channel) -> None:
    outbox: queue.Queue[None] = queue.Queue()
    with pytest.raises(grpc.RpcError, match="did not come"):
        EngineStub(channel).Vision(iter(outbox.get, None), timeout=20)
    outbox.put(None)


def takes_no_snapshot(channel: grpc.Channel) -> None:
    """More is sent than fits on the way, until the engine has waited for long enough."""
    given_up = Counted.given_up
    stream = Stream(channel)
    stream.send(start=start(*PROMPT, snapshot_answer=True))
    assert soon(lambda: Counted.given_up > given_up)
    stream.call.cancel()
    stream.half_close()


# How long the engine waits for what the client never does; for all else it has time enough.
HASTE: dict[Callable[[grpc.Channel], None], tuple[ModuleType, str]] = {
    says_nothing: (engine_call, "START_TIMEOUT_S"),
    sends_no_picture: (vision_call, "RECEIVE_S"),
}
HASTE_S = 0.2
BROKEN_OFF: dict[Callable[[grpc.Channel], None], int] = {  # of a call, if it were; of others chance has it
    ends_first: 1,
    says_nothing: 1,
    sends_no_picture: 1,
    takes_no_snapshot: 2,
}
CALLS = 3


def end_calls(way: Callable[[grpc.Channel], None]) -> None:
    """A few calls that end in this way, and until nothing of them is under way any more."""
    with (
        pytest.MonkeyPatch.context() as patch,
        toy(config=LARGE, hot_bytes=4 * SNAPSHOT_BYTES) as t,
        serving(t.engine, snapshot_timeout_s=HASTE_S if way is takes_no_snapshot else 20.0) as running,
        channel_to(running) as channel,
    ):
        if way in HASTE:
            patch.setattr(*HASTE[way], HASTE_S)
        t.model.before = lambda segments: time.sleep(0.01)  # a long answer lasts
        for _ in range(CALLS):
            way(channel)
        assert soon(lambda: Counted.ended == Counted.begun), "an operation that nobody waits for ends with its call"
    assert Counted.begun >= CALLS


@pytest.mark.parametrize("way", [*BROKEN_OFF, hangs_up, is_refused])
def test_no_operation_is_broken_off(way: Callable[[grpc.Channel], None]) -> None:
    end_calls(way)
    assert Counted.broken_off == 0


@pytest.mark.parametrize("way", BROKEN_OFF)
def test_what_is_broken_off_shows(way: Callable[[grpc.Channel], None], monkeypatch: pytest.MonkeyPatch) -> None:
    let_broken_off(monkeypatch)
    end_calls(way)
    assert Counted.broken_off == CALLS * BROKEN_OFF[way]
