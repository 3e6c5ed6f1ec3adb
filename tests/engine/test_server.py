"""The gRPC server around a toy engine: the stream's order, statuses, health, and what a client that goes away costs."""

import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from toy_engine import CONFIG, INFO, Gate, Toy, answer, soon, toy
from toy_server import Running, Stream, channel_to, code_of, serving, start

from services.engine.call import Call
from services.engine.request import Request
from services.engine.server import Server
from services.rpc import engine_pb2 as pb
from services.rpc.engine_pb2_grpc import EngineStub
from services.settings import SettingError

PROMPT = (1, 2, 3, 4, 5) * 5


@pytest.fixture
def t() -> Iterator[Toy]:
    with toy() as engine:
        yield engine


@pytest.fixture
def running(t: Toy) -> Iterator[Running]:
    with serving(t.engine) as server:
        yield server


@pytest.fixture
def channel(running: Running) -> Iterator[grpc.Channel]:
    with channel_to(running) as channel:
        yield channel


def tokens(messages: list[pb.GenerateOut]) -> list[int]:
    return [message.token.id for message in messages if message.WhichOneof("message") == "token"]


def test_a_generation_from_start_to_snapshots(channel: grpc.Channel) -> None:
    stream = Stream(channel)
    stream.send(start=start(*PROMPT, snapshot_at=[13], snapshot_answer=True))
    stream.half_close()
    messages = stream.rest()
    assert tokens(messages) == answer(list(PROMPT), 6)
    kinds = [message.WhichOneof("message") for message in messages]
    assert kinds == ["restore", *["progress"] * 4, *["token"] * 6, "finish", "snapshot", "chunk", "snapshot", "chunk"]
    finish = messages[11].finish
    assert (finish.reason, finish.prompt_tokens, finish.executed_tokens, finish.generated_tokens) == (2, 25, 25, 6)
    heads = [message.snapshot for message in messages if message.WhichOneof("message") == "snapshot"]
    assert [(head.state.tokens, head.chunks) for head in heads] == [(13, 1), (30, 1)]


def test_a_payload_goes_out_and_comes_back(t: Toy, channel: grpc.Channel) -> None:
    first = Stream(channel)
    first.send(start=start(*PROMPT, snapshot_at=[13]))
    state = first.until("snapshot").state
    data = first.next("chunk").data
    with toy() as other, serving(other.engine) as elsewhere, channel_to(elsewhere) as there:
        stream = Stream(there)
        stream.send(start=start(*PROMPT, offers=[state]))
        asked = stream.next("restore")
        assert (asked.source, asked.state) == (pb.Restore.SEND, state)
        stream.send(chunk=pb.SnapshotChunk(index=0, data=data[:1000]))
        stream.send(chunk=pb.SnapshotChunk(index=1, data=data[1000:]))
        assert stream.next("restore").source == pb.Restore.SENT
        messages = stream.rest()
        assert tokens(messages) == answer(list(PROMPT), 6)
        assert messages[-1].finish.cached_tokens == 13
        assert other.value("prefix_cache_hits_total") == 13
    again = Stream(channel)
    again.send(start=start(*PROMPT, offers=[state]))
    assert again.next("restore").source == pb.Restore.HOT
    again.rest()


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([(1, b"x")], "chunk 1 came where chunk 0 was due"),
        ([(0, b"")], "chunk 0 has 0 bytes"),
        ([(0, bytes((1 << 20) + 1))], "chunk 0 has 1048577 bytes, expected 1 to 1048576"),
        ([(0, b"x" * 2005)], "chunk 0 goes beyond the 2004 bytes"),
        ([(0, b"x" * 2004)], "it is not a snapshot"),
        ([(0, b"x" * 10), None], "the client sent 10 of 2004 bytes"),
        ([None], "the client sent 0 of 2004 bytes"),
    ],
    ids=["index", "empty", "large", "long", "garbage", "half", "nothing"],
)
def test_a_bad_payload_is_refused_and_the_chat_goes_on(
    t: Toy, channel: grpc.Channel, chunks: list[tuple[int, bytes] | None], reason: str
) -> None:
    ref = t.hot.name(PROMPT[:13])
    stream = Stream(channel)
    offer = pb.StateRef(state_id=ref.state_id, tokens=13, size_bytes=ref.size_bytes)
    stream.send(start=start(*PROMPT, offers=[offer]))
    assert stream.next("restore").source == pb.Restore.SEND
    for chunk in chunks:
        if chunk is None:
            stream.half_close()
        else:
            stream.send(chunk=pb.SnapshotChunk(index=chunk[0], data=chunk[1]))
    refused = stream.next("restore")
    assert refused.source == pb.Restore.REFUSED
    assert reason in refused.reason
    stream.send(chunk=pb.SnapshotChunk(index=7, data=b"late: ignored"))
    assert tokens(stream.rest()) == answer(list(PROMPT), 6)


def test_a_payload_that_never_comes_is_not_waited_for() -> None:
    with toy() as t, serving(t.engine, snapshot_timeout_s=0.2) as running, channel_to(running) as channel:
        ref = t.hot.name(PROMPT[:13])
        stream = Stream(channel)
        offer = pb.StateRef(state_id=ref.state_id, tokens=13, size_bytes=ref.size_bytes)
        stream.send(start=start(*PROMPT, offers=[offer]))
        stream.next("restore")
        assert "did not send it within 0 s" in stream.next("restore").reason
        assert tokens(stream.rest()) == answer(list(PROMPT), 6)


def test_stop_ends_an_answer(t: Toy, channel: grpc.Channel) -> None:
    gate = Gate()
    t.model.before = gate
    stream = Stream(channel)
    stream.send(start=start(*PROMPT, max_tokens=500, snapshot_answer=True))
    gate.hold(6)
    stream.send(stop=pb.Stop())
    stream.half_close()
    assert soon(lambda: bool(t.engine._inbox)), "the thread is told, once it comes back from the gate"
    gate.open()
    messages = stream.rest()
    finish = next(message.finish for message in messages if message.WhichOneof("message") == "finish")
    assert finish.reason == pb.Finish.STOP
    assert tokens(messages) == answer(list(PROMPT), 500)[: finish.generated_tokens]
    assert messages[-1].WhichOneof("message") == "chunk"


def test_metadata_comes_when_the_request_is_taken_in_though_it_waits(t: Toy, channel: grpc.Channel) -> None:
    gate = Gate()
    t.model.before = gate
    streams = [Stream(channel) for _ in range(3)]
    for stream in streams:
        stream.send(start=start(*PROMPT))
        assert stream.call.initial_metadata() is not None  # blocks until it is there
    assert not gate._allowed, "nothing has run yet"
    gate.open()
    for stream in streams:
        assert tokens(stream.rest()) == answer(list(PROMPT), 6)


@pytest.mark.parametrize(
    ("messages", "status", "code", "text"),
    [
        ([{"start": start(1, 99)}], grpc.StatusCode.INVALID_ARGUMENT, "bad_ids", "ids has 99"),
        ([{"start": start()}], grpc.StatusCode.INVALID_ARGUMENT, "bad_ids", "ids is empty"),
        ([{"start": start(1, max_tokens=0)}], grpc.StatusCode.INVALID_ARGUMENT, "bad_sampling", "max_tokens is 0"),
        ([{"start": start(1, max_tokens=2000)}], grpc.StatusCode.INVALID_ARGUMENT, "context_too_long", "of 1024"),
        (
            [{"start": start(1, sampling=pb.Sampling(temperature=float("nan")))}],
            grpc.StatusCode.INVALID_ARGUMENT,
            "bad_sampling",
            "temperature is nan",
        ),
        ([{"start": start(1, snapshot_at=[1])}], grpc.StatusCode.INVALID_ARGUMENT, "bad_snapshot_position", "ascend"),
        ([None], grpc.StatusCode.INVALID_ARGUMENT, "bad_stream", "first message"),
        ([{"stop": pb.Stop()}], grpc.StatusCode.INVALID_ARGUMENT, "bad_stream", "first message"),
        ([{}], grpc.StatusCode.INVALID_ARGUMENT, "bad_stream", "first message"),
        (
            [{"start": start(*PROMPT, max_tokens=900)}, {"start": start(1)}],
            grpc.StatusCode.INVALID_ARGUMENT,
            "bad_stream",
            "a start came",
        ),
        (
            [{"start": start(*PROMPT, max_tokens=900)}, {"chunk": pb.SnapshotChunk()}],
            grpc.StatusCode.INVALID_ARGUMENT,
            "bad_stream",
            "a chunk came",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and "_" in value else "",
)
def test_errors_are_statuses_with_a_code(
    t: Toy,
    channel: grpc.Channel,
    messages: list[dict[str, object] | None],
    status: grpc.StatusCode,
    code: str,
    text: str,
) -> None:
    gate = Gate()
    t.model.before = gate  # an answer is still under way when its client's second message comes
    stream = Stream(channel)
    for message in messages:
        stream.half_close() if message is None else stream.send(**message)
    error = stream.error()
    gate.open()
    assert (error.code(), code_of(error)) == (status, code)  # type: ignore[attr-defined]
    assert text in error.details()  # type: ignore[attr-defined]
    assert soon(lambda: t.pool.free == t.pool.total)


def test_a_full_queue_is_resource_exhausted(t: Toy, channel: grpc.Channel) -> None:
    gate = Gate()
    t.model.before = gate
    streams = [Stream(channel) for _ in range(5)]
    for stream in streams:
        stream.send(start=start(*PROMPT))
        stream.call.initial_metadata()
    refused = Stream(channel)
    refused.send(start=start(*PROMPT))
    error = refused.error()
    assert (error.code(), code_of(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "queue_full")  # type: ignore[attr-defined]
    gate.open()
    for stream in streams:
        stream.rest()


def test_calls_that_are_over_are_let_go_without_python_s_collector(t: Toy, channel: grpc.Channel) -> None:
    """Refused ones too: grpc keeps the exception of each in a cycle, but not the prompt along with it."""

    def alive(kind: type) -> int:
        return sum(type(one) is kind for one in gc.get_objects())

    gc.collect()
    calls, requests = alive(Call), alive(Request)  # what tests that failed before keep is none of this one's
    gc.disable()
    try:
        test_a_full_queue_is_resource_exhausted(t, channel)
        assert soon(lambda: alive(Call) <= calls)
        assert soon(lambda: alive(Request) <= requests + 1), "but for the thread's last one"
    finally:
        gc.enable()


def test_a_failed_step_is_internal_and_the_next_call_is_served(t: Toy, channel: grpc.Channel) -> None:
    def fail(segments: object) -> None:
        raise RuntimeError("out of luck")

    t.model.before = fail
    stream = Stream(channel)
    stream.send(start=start(*PROMPT))
    error = stream.error()
    assert (error.code(), code_of(error)) == (grpc.StatusCode.INTERNAL, "step_failed")  # type: ignore[attr-defined]
    t.model.before = lambda segments: None
    again = Stream(channel)
    again.send(start=start(*PROMPT))
    assert tokens(again.rest()) == answer(list(PROMPT), 6)


def test_vision_is_unimplemented_and_info_tells_the_limits(channel: grpc.Channel) -> None:
    stub = EngineStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        stub.Vision(iter([pb.VisionIn(data=b"x")]))
    assert (caught.value.code(), code_of(caught.value)) == (grpc.StatusCode.UNIMPLEMENTED, "unsupported")
    assert "cannot see pictures" in caught.value.details()
    info = stub.Info(pb.InfoRequest())
    assert {field.name: getattr(info, field.name) for field in info.DESCRIPTOR.fields} == vars(INFO)


def health(channel: grpc.Channel, service: str = "") -> int:
    return int(health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service)).status)


def test_health_follows_the_engine(t: Toy) -> None:
    with serving(None) as running, channel_to(running) as channel:
        assert health(channel) == health(channel, "thimble.v1.Engine") == health_pb2.HealthCheckResponse.NOT_SERVING
        with pytest.raises(grpc.RpcError) as caught:
            EngineStub(channel).Info(pb.InfoRequest())
        assert (caught.value.code(), code_of(caught.value)) == (grpc.StatusCode.UNAVAILABLE, "engine_stopping")
        running.do(running.server.serve(t.engine))
        assert health(channel) == health(channel, "thimble.v1.Engine") == health_pb2.HealthCheckResponse.SERVING
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        running.do(running.server.stop(0.0))
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_reflection_lists_the_service(channel: grpc.Channel) -> None:
    services = set(ProtoReflectionDescriptorDatabase(channel).get_services())
    assert {"thimble.v1.Engine", "grpc.health.v1.Health"} <= services


@pytest.mark.parametrize("call_number", [2, 6], ids=["while the prompt is read", "while it answers"])
def test_a_client_that_cancels_frees_its_sequence(t: Toy, channel: grpc.Channel, call_number: int) -> None:
    gate = Gate()
    t.model.before = gate
    stream = Stream(channel)
    stream.send(start=start(*PROMPT, max_tokens=900))
    gate.hold(call_number)
    assert t.pool.free < t.pool.total
    stream.call.cancel()
    assert soon(lambda: bool(t.engine._inbox)), "the thread is told, once it comes back from the gate"
    gate.open()
    assert soon(lambda: t.value("request_failures_total", code="cancelled") == 1)
    assert soon(lambda: t.pool.free == t.pool.total)
    assert len(t.model.calls) == call_number


def test_a_deadline_that_passes_frees_the_sequence(t: Toy, channel: grpc.Channel) -> None:
    t.model.before = lambda segments: time.sleep(0.01)
    call = EngineStub(channel).Generate(iter([pb.GenerateIn(start=start(*PROMPT, max_tokens=900))]), timeout=0.3)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert soon(lambda: t.pool.free == t.pool.total)


VANISH = """
import sys, grpc, os
from services.rpc import engine_pb2 as pb
from services.rpc.engine_pb2_grpc import EngineStub
channel = grpc.insecure_channel(sys.argv[1])
call = EngineStub(channel).Generate(iter([pb.GenerateIn(start=pb.Start(ids=[1] * 25, max_tokens=900))]))
next(call)
print("under way", flush=True)
sys.stdin.read()
"""


def test_a_client_process_that_dies_frees_its_sequence(t: Toy, running: Running) -> None:
    t.model.before = lambda segments: time.sleep(0.01)
    client = subprocess.Popen(
        [sys.executable, "-c", VANISH, running.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with client:
        assert client.stdout is not None
        assert client.stdout.readline() == "under way\n"
        assert t.pool.free < t.pool.total
        client.kill()
    assert soon(lambda: t.value("request_failures_total", code="cancelled") == 1)
    assert t.pool.free == t.pool.total


def test_a_client_that_takes_nothing_costs_only_itself(t: Toy, running: Running) -> None:
    """It reads no message; the others are served, and at its end everything is free."""
    gate = Gate()
    t.model.before = gate
    with channel_to(running) as slow, channel_to(running) as quick:
        lazy = Stream(slow)
        lazy.send(start=start(*PROMPT, max_tokens=900, snapshot_answer=True))
        gate.hold(6)
        assert t.value("num_requests_running") == 1
        stream = Stream(quick)
        stream.send(start=start(*PROMPT))
        stream.call.initial_metadata()
        gate.open()  # both are there
        assert tokens(stream.rest()) == answer(list(PROMPT), 6)
    assert soon(lambda: t.pool.free == t.pool.total)


def test_a_client_that_does_not_take_its_snapshot_loses_the_call_not_the_engine() -> None:
    """What is owed to it is pinned in a bounded memory: it must not stay there for ever."""
    large = replace(CONFIG, mamba_state=1 << 18)  # 32 MiB: more than any flow control window
    with (
        toy(config=large, hot_bytes=40 << 20) as t,
        serving(t.engine, snapshot_timeout_s=0.3) as running,
        channel_to(running) as channel,
    ):
        stream = Stream(channel)
        stream.send(start=start(*PROMPT, snapshot_answer=True))
        stream.until("finish")
        assert soon(lambda: not any(state.pins for state in t.hot._states.values())), "it waits for ever"
        error = stream.error()
        assert (error.code(), code_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "bad_stream")  # type: ignore[attr-defined]
        assert "took no snapshot" in error.details()  # type: ignore[attr-defined]
        # Unpinned: another state of that size finds room.
        other = Stream(channel)
        other.send(start=start(9, 9, 9, snapshot_answer=True, heads_only=True))
        assert other.until("snapshot").state.tokens == 8


def test_a_taken_port_is_an_error(running: Running) -> None:
    async def again() -> None:
        Server("127.0.0.1", running.server.port, 1.0)

    with pytest.raises(SettingError, match=rf"gRPC cannot listen on 127.0.0.1:{running.server.port}"):
        running.do(again())
