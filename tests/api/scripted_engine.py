"""An engine for the api's tests: a real gRPC server that keeps the contract, with a script in place of a model. States
are the ids they have read; every offer and payload is checked against them. It remembers what it was asked."""

import contextlib
import hashlib
import queue
import socket
import threading
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.rpc import engine_pb2 as pb
from services.rpc import engine_pb2_grpc as rpc

CHUNK_BYTES = 1024 * 1024
BLOCK_TOKENS, BLOCK_BYTES = 16, 16_000
MAGIC = b"scripted state "
VOCABULARY = 4096


@dataclass
class Failure:
    """How a call fails: before anything, or after so many tokens."""

    status: grpc.StatusCode
    details: str = "as the test wants it"
    code: str | None = None
    after_tokens: int | None = None
    retry_after_s: str | None = None


@dataclass
class Call:
    start: pb.Start
    restored_tokens: int = 0
    source: str = ""
    received_bytes: int = 0
    lent_chunks: int = 0
    sent_blocks: list[int] = field(default_factory=list)  # how many, of each snapshot
    sent_tokens: int = 0
    stopped: bool = False
    stop_thinking: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    cancelled_at: float = 0.0  # time.monotonic()
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def executed(self) -> list[int]:
        return list(self.start.ids[self.restored_tokens :])


class ScriptedEngine(rpc.EngineServicer):
    """`script` is what it answers next; all switches may be changed between requests."""

    def __init__(self, port: int = 0) -> None:
        self.script: list[int] = []
        self.failure: Failure | None = None
        self.token_s = 0.0
        self.prompt_s = 0.0
        self.admission_s = 0.0
        self.hurry = threading.Event()  # set: it takes none of these times any more
        self.context_tokens = 4096
        self.fingerprint = "feed" * 8
        self.payload_bytes = 2 * CHUNK_BYTES + 12345
        self.keeps_hot = True
        self.keeps_in_passing = True
        self.refuses_payloads = False
        self.borrows = True  # else it asks for chunks instead
        self.hears_stop = True
        self.vision = False
        self.hot: dict[bytes, tuple[int, ...]] = {}
        self.hot_blocks: set[bytes] = set()
        self.exchange_dir: Path | None = None
        self.mark = "engine-scripted"
        self.calls: list[Call] = []
        self.idle_calls: list[Call] = []
        self.does_idle_work = True
        self._server = grpc.server(ThreadPoolExecutor(32))
        rpc.add_EngineServicer_to_server(self, self._server)
        self.health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()
        self.serving(True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def serving(self, yes: bool) -> None:
        states = health_pb2.HealthCheckResponse
        self.health.set("", states.SERVING if yes else states.NOT_SERVING)

    def close(self) -> None:
        self._server.stop(0).wait(5)

    def state_id(self, ids: tuple[int, ...]) -> bytes:
        return hashlib.sha256(self.fingerprint.encode() + array("I", ids).tobytes()).digest()[:16]

    def payload(self, ids: tuple[int, ...]) -> bytes:
        body = MAGIC + self.fingerprint.encode() + array("I", [len(ids), *ids]).tobytes()
        filling = hashlib.sha256(body).digest() * (self.payload_bytes // 32 + 1)
        return (body + filling)[: self.payload_bytes]

    def blocks(self, ids: tuple[int, ...]) -> dict[bytes, bytes]:
        """Name -> content of the blocks of a state: each depends on all ids up to its end."""
        ends = range(BLOCK_TOKENS, len(ids) + 1, BLOCK_TOKENS)
        names = [hashlib.sha256(b"block" + self.state_id(ids[:end])).digest()[:16] for end in ends]
        return {name: name * (BLOCK_BYTES // 16) for name in names}

    def Info(self, request: pb.InfoRequest, context: Any) -> pb.InfoResponse:
        return pb.InfoResponse(
            model="demo",
            model_fingerprint="c0ffee",
            arithmetic_fingerprint=self.fingerprint,
            vocab_size=VOCABULARY,
            context_tokens=self.context_tokens,
            max_sequences=4,
            queue_limit=16,
            vision=self.vision,
            device="script",
            version="0",
            exchange=self._mark(),
        )

    def _mark(self) -> str:
        if self.exchange_dir is None:
            return ""
        (self.exchange_dir / self.mark).touch()
        return self.mark

    def Generate(self, requests: Iterator[pb.GenerateIn], context: Any) -> Iterator[pb.GenerateOut]:
        inbox: queue.Queue[pb.GenerateIn | None] = queue.Queue()

        def read() -> None:
            try:
                for message in requests:
                    inbox.put(message)
            except Exception:  # cancelled
                pass
            inbox.put(None)

        threading.Thread(target=read, daemon=True).start()
        first = inbox.get(timeout=10)
        assert first is not None
        call = Call(first.start)
        (self.idle_calls if call.start.idle else self.calls).append(call)
        context.add_callback(lambda: self._over(call))
        try:
            if self.failure and self.failure.after_tokens is None:
                self._fail(context)
            assert all(0 <= i < VOCABULARY for i in call.start.ids)
            assert len(call.start.ids) + call.start.max_tokens <= self.context_tokens
            positions = list(call.start.snapshot_at)
            assert positions == sorted(set(positions))
            positions += call.start.passing_at
            assert len(positions) == len(set(positions))
            assert all(0 < position < len(call.start.ids) for position in positions)
            self._wait(self.admission_s, context)
            context.send_initial_metadata(())
            yield from self._generate(call, inbox, context)
        finally:
            if context.is_active():
                call.ended.set()

    def _over(self, call: Call) -> None:
        if not call.ended.is_set():
            call.cancelled_at = time.monotonic()
            call.cancelled.set()

    def _generate(self, call: Call, inbox: Any, context: Any) -> Iterator[pb.GenerateOut]:
        start, ids = call.start, tuple(call.start.ids)
        yield from self._restore(call, inbox)
        left_ms = round(self.prompt_s * 1e3)
        begun = pb.Progress(done_tokens=call.restored_tokens, total_tokens=len(ids), left_ms=left_ms)
        yield pb.GenerateOut(progress=begun)
        passed = [p for p in start.passing_at if p > call.restored_tokens and self.keeps_in_passing]
        for number, position in enumerate(passed):
            if number:
                self.hot.pop(self.state_id(ids[: passed[number - 1]]), None)
            told = pb.Progress(done_tokens=position, total_tokens=len(ids), passing=self._take(ids[:position]))
            yield pb.GenerateOut(progress=told)
        self._wait(self.prompt_s, context)
        yield pb.GenerateOut(progress=pb.Progress(done_tokens=len(ids), total_tokens=len(ids)))
        answer: list[int] = []
        reason = pb.Finish.LENGTH
        if start.idle:
            while not self.does_idle_work:
                self._wait(0.05, context)
        for token_id in [] if start.idle else [*self.script, *start.stop_ids[:1]]:
            if self.failure and self.failure.after_tokens == len(answer):
                self._fail(context)
            self._wait(self.token_s, context)
            if call.stopped or (self.hears_stop and self._stop_asked(call, inbox)):
                call.stopped, reason = True, pb.Finish.STOP
                break
            answer.append(token_id)
            yield pb.GenerateOut(token=self._token(start, token_id))
            call.sent_tokens += 1
            if token_id in start.stop_ids:
                reason = pb.Finish.STOP
                break
            if len(answer) == start.max_tokens:
                break
        at = sorted([*(p for p in start.snapshot_at if p > call.restored_tokens), *passed[-1:]])
        states = [ids[:position] for position in at]
        assert start.snapshots_on_request
        if start.snapshot_answer and (answer or start.idle):
            states.append((*ids, *answer[:-1]))
        yield pb.GenerateOut(
            finish=pb.Finish(
                reason=reason,
                prompt_tokens=len(ids),
                cached_tokens=call.restored_tokens,
                executed_tokens=len(ids) - call.restored_tokens,
                generated_tokens=len(answer),
                queue_s=0.001,
                prefill_s=0.25,
                decode_s=0.5,
                taken=[self._take(state) for state in states],
            )
        )
        for state in states:
            yield from self._snapshot(call, state, inbox)

    def _restore(self, call: Call, inbox: Any) -> Iterator[pb.GenerateOut]:
        ids = tuple(call.start.ids)
        for ref in call.start.offers:
            assert ref.state_id == self.state_id(ids[: ref.tokens]), "an offer's state has not read this prompt's ids"
        for ref in call.start.offers:
            if ref.state_id in self.hot:
                call.restored_tokens, call.source = ref.tokens, "HOT"
                yield pb.GenerateOut(restore=pb.Restore(source=pb.Restore.HOT, state=ref))
                return
            if ref.size_bytes:
                blocks = self.blocks(ids[: ref.tokens])
                assert list(ref.blocks) == list(blocks)
                need = [number for number, name in enumerate(blocks) if name not in self.hot_blocks]
                yield pb.GenerateOut(restore=pb.Restore(source=pb.Restore.SEND, state=ref, need=need))
                expected = self.payload(ids[: ref.tokens]) + b"".join(list(blocks.values())[number] for number in need)
                data = bytearray()
                while len(data) < len(expected):
                    message = inbox.get(timeout=10)
                    if message is None or message.WhichOneof("message") == "unavailable":
                        break
                    if message.WhichOneof("message") == "lent" and self.borrows:
                        data += self._lent(call, message.lent)
                        break
                    if message.WhichOneof("message") == "lent":
                        yield pb.GenerateOut(restore=pb.Restore(source=pb.Restore.SEND, state=ref, need=need))
                        continue
                    data += message.chunk.data
                call.received_bytes = len(data)
                good = data == expected and not self.refuses_payloads
                call.source = "SENT" if good else "REFUSED"
                call.restored_tokens = ref.tokens if good else 0
                source = pb.Restore.SENT if good else pb.Restore.REFUSED
                yield pb.GenerateOut(
                    restore=pb.Restore(
                        source=source,
                        state=ref,
                        reason="" if good else "not my bytes",
                        damaged=not good and len(data) == len(expected),
                    )
                )
                return
        call.source = "NONE"
        yield pb.GenerateOut(restore=pb.Restore(source=pb.Restore.NONE))

    def _lent(self, call: Call, lent: pb.Lent) -> bytes:
        """What comes on the connection, as far as it has the sizes that were announced."""
        assert self.exchange_dir is not None
        with socket.socket(socket.AF_UNIX) as counter:
            counter.connect(str(self.exchange_dir / lent.name))
            _, descriptors, _, _ = socket.recv_fds(counter, 1, 1)
        data = bytearray()
        with socket.socket(fileno=descriptors[0]) as connection:
            connection.settimeout(lent.silence_ms / 1e3)
            answers = connection.makefile("rb")
            with contextlib.suppress(TimeoutError):
                for request, size in zip(lent.requests, lent.sizes, strict=True):
                    connection.sendall(request)
                    if answers.readline() != b"$%d\r\n" % size:
                        break
                    data += answers.read(size)
                    assert answers.read(2) == b"\r\n"
                    call.lent_chunks += 1
        return bytes(data)

    def _take(self, ids: tuple[int, ...]) -> pb.StateRef:
        blocks = self.blocks(ids)
        ref = pb.StateRef(
            state_id=self.state_id(ids),
            tokens=len(ids),
            size_bytes=len(self.payload(ids)),
            blocks=list(blocks),
            block_bytes=BLOCK_BYTES,
        )
        if self.keeps_hot:
            self.hot[ref.state_id] = ids
        return ref

    def _snapshot(self, call: Call, ids: tuple[int, ...], inbox: Any) -> Iterator[pb.GenerateOut]:
        data, ref, head_only = self.payload(ids), self._take(ids), call.start.heads_only
        chunks = [] if head_only else [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
        yield pb.GenerateOut(snapshot=pb.SnapshotHead(state=ref, chunks=len(chunks)))
        if head_only:
            return
        while (message := inbox.get(timeout=10)) is not None and message.WhichOneof("message") != "want":
            pass
        if message is None:
            return
        blocks = list(self.blocks(ids).values())
        call.sent_blocks.append(len(message.want.blocks))
        wanted = (chunks if message.want.own_part else []) + [blocks[number] for number in message.want.blocks]
        for index, chunk in enumerate(wanted):
            yield pb.GenerateOut(chunk=pb.SnapshotChunk(index=index, data=chunk))

    def _token(self, start: pb.Start, token_id: int) -> pb.Token:
        """With log probabilities that a test can tell apart: -id / 1000, and those of the ids below."""
        if not start.HasField("logprobs"):
            return pb.Token(id=token_id)
        others = [pb.TopToken(id=token_id - i, logprob=(i - token_id) / 1000) for i in range(start.logprobs.top)]
        return pb.Token(id=token_id, logprob=-token_id / 1000, top=others)

    def _stop_asked(self, call: Call, inbox: Any) -> bool:
        try:
            message = inbox.get_nowait()
        except queue.Empty:
            return False
        kind = None if message is None else message.WhichOneof("message")
        if kind == "stop_thinking":
            call.stop_thinking.set()
        return kind == "stop"

    def _wait(self, seconds: float, context: Any) -> None:
        until = time.monotonic() + seconds
        while context.is_active() and time.monotonic() < until and not self.hurry.is_set():
            time.sleep(0.005)
        if not context.is_active():
            raise RuntimeError("cancelled")

    def _fail(self, context: Any) -> None:
        failure, self.failure = self.failure, None
        assert failure is not None
        told = {"thimble-code": failure.code, "thimble-retry-after-s": failure.retry_after_s}
        context.set_trailing_metadata(tuple((key, value) for key, value in told.items() if value))
        context.abort(failure.status, failure.details)
