"""One Generate call: a writer that tells the client what happens, and beside it a reader that takes what it sends.

Owns the order of messages on the stream. Whatever way the call ends, the request is cancelled on the way out, which
frees what it still holds; a client that goes away ends it by cancelling this task.
"""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.engine.engine import Engine, Handle
from services.engine.errors import StreamError, TransferError
from services.engine.exchange import Lent, borrow
from services.engine.messages import EVERYTHING, NOTHING, Want, message_of, request_of, snapshot_chunks, snapshot_head
from services.engine.request import Event, Failed, Finish, Request, Restore, Snapshot, Source
from services.engine.upload import Upload
from services.unbroken import Reads, unbroken

START_TIMEOUT_S = 30.0
EOF = grpc.aio.EOF  # type: ignore[attr-defined]

Context = Any  # grpc.aio.ServicerContext, for which there are no full types


class Call:
    """`context` is gRPC's. Raises EngineError for whatever ends the call without an answer."""

    def __init__(self, engine: Engine, context: Context, snapshot_timeout_s: float) -> None:
        self._engine = engine
        self._context = context
        self._reads = Reads(context.read)
        self._snapshot_timeout_s = snapshot_timeout_s
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._upload: Upload | None = None
        self._expected: Restore | None = None  # what the client was asked for
        self._deadline: asyncio.TimerHandle | None = None  # of the upload
        self._half_closed = False
        self._borrowing: asyncio.Task[None] | None = None
        self._lent: Lent | None = None
        self._watching = False  # whether more comes on it
        self._silence: asyncio.TimerHandle | None = None
        self._over = False
        self._wants: asyncio.Queue[Want] = asyncio.Queue()

    async def run(self) -> None:
        request = await self._start()
        await self._engine.prepare(request)
        loop = asyncio.get_running_loop()

        def sink(event: Event) -> None:  # called by the engine's thread: hands the event over to this loop
            loop.call_soon_threadsafe(self._events.put_nowait, event)

        handle = self._engine.submit(request, sink)
        try:
            await unbroken(self._context.send_initial_metadata(()))
            reader = asyncio.create_task(self._read(handle))
            try:
                await self._write(handle, request.snapshots_on_request and not request.heads_only)
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)
        finally:
            self._over = True
            handle.cancel()
            if self._deadline is not None:
                self._deadline.cancel()  # it would keep what was received until it is due
            if self._borrowing is not None:
                await asyncio.gather(self._borrowing, return_exceptions=True)  # it is short, and may bring a connection
            if self._lent is not None:
                self._ignore(self._lent)
                handle.then(self._lent.close)  # by the thread that may be reading

    async def _start(self) -> Request:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                message = await self._receive()
        except TimeoutError:
            raise StreamError(f"no Start came within {START_TIMEOUT_S:.0f} s of the call") from None
        if message is EOF or message.WhichOneof("message") != "start":
            raise StreamError("the first message of a Generate stream is a Start")
        return request_of(message.start)

    async def _receive(self) -> Any:
        """The next message, or EOF. Raises StreamError for bytes that are none."""
        try:
            return await self._reads.next()
        except DecodeError as error:
            raise StreamError("a message that cannot be read: its bytes are no message of the contract") from error

    async def _read(self, handle: Handle) -> None:
        try:
            await self._heed(handle)
        except StreamError as error:
            self._events.put_nowait(Failed(error))

    async def _heed(self, handle: Handle) -> None:
        while (message := await self._receive()) is not EOF:
            match message.WhichOneof("message"):
                case "stop":
                    handle.stop()
                case "stop_thinking":
                    handle.stop_thinking()
                case "chunk" if self._upload is not None:
                    self._upload.add(message.chunk.index, message.chunk.data)
                case "lent" if self._upload is not None and self._borrowing is None:
                    self._borrowing = asyncio.create_task(self._borrow(message.lent, handle))
                case "unavailable" if self._upload is not None:
                    self._upload.end_of_stream()
                case "want":
                    self._wants.put_nowait(Want(message.want.own_part, tuple(message.want.blocks)))
                case kind:
                    raise StreamError(f"a {kind or 'message without content'} came where none was asked for")
        self._half_closed = True
        self._wants.put_nowait(NOTHING)
        if self._upload is not None:
            self._upload.end_of_stream()

    async def _write(self, handle: Handle, on_request: bool) -> None:
        while True:
            event = await self._events.get()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Restore) and event.source is Source.SEND and event.state is not None:
                self._expect(event, handle)
            await unbroken(self._context.write(message_of(event)))
            if isinstance(event, Finish):
                break
        for snapshot in event.snapshots:
            try:
                async with asyncio.timeout(self._snapshot_timeout_s):
                    await self._send(snapshot, on_request)
            except TimeoutError:
                raise StreamError(f"the client took no snapshot within {self._snapshot_timeout_s:.0f} s") from None

    async def _borrow(self, told: Any, handle: Handle) -> None:
        """Have the engine's thread read the payload on a connection of the client's, and again whenever more is there
        than it found; the upload only hears of what goes wrong then. If there is no connection, the client is asked
        for chunks."""
        upload, expected = self._upload, self._expected
        assert upload is not None
        assert expected is not None
        loop, silence_s = asyncio.get_running_loop(), told.silence_ms / 1e3

        def wait() -> None:  # called by the engine's thread
            loop.call_soon_threadsafe(watch)

        def watch() -> None:
            if not (self._over or upload.over):
                loop.add_reader(lent.connection, ready)
                self._watching = True
                late = f"snapshot: the store was silent for {silence_s:.1f} s"
                self._silence = loop.call_later(silence_s, upload.refuse, late)

        def ready() -> None:
            self._ignore(lent)
            handle.restore(lent)

        try:
            connection = await asyncio.to_thread(borrow, self._engine.exchange_dir, told.name)
            try:
                lent = self._lent = Lent(connection, tuple(told.requests), tuple(told.sizes), wait)
            except TransferError:
                connection.close()
                raise
        except TransferError as error:
            if not upload.over:
                self._events.put_nowait(replace(expected, reason=str(error)))
            return
        if upload.over:
            lent.close()
        else:
            handle.restore(lent)

    def _ignore(self, lent: Lent) -> None:
        if self._watching:
            asyncio.get_running_loop().remove_reader(lent.connection)
            self._watching = False
        if self._silence is not None:
            self._silence.cancel()

    async def _send(self, snapshot: Snapshot, on_request: bool) -> None:
        """The head, and of the rest what the client wants."""
        await unbroken(self._context.write(snapshot_head(snapshot)))
        want = EVERYTHING
        if on_request:
            want = NOTHING if self._half_closed and self._wants.empty() else await self._wants.get()
        for message in snapshot_chunks(snapshot, want):
            await unbroken(self._context.write(message))

    def _expect(self, expected: Restore, handle: Handle) -> None:
        """Before the client is asked, so that no chunk can come too early."""

        def take(chunk: bytes, refusal: str) -> None:
            lent = self._lent
            if refusal and lent is not None:
                self._ignore(lent)
            handle.restore(chunk, refusal)
            if refusal and lent is not None:
                handle.then(lent.close)  # by the thread that may be reading

        assert expected.state is not None
        self._expected = expected
        upload = self._upload = Upload(expected.state, len(expected.need), take)
        if self._half_closed:
            upload.end_of_stream()
        if self._deadline is not None:
            self._deadline.cancel()
        late = f"the client did not send it within {self._snapshot_timeout_s:.0f} s"
        self._deadline = asyncio.get_running_loop().call_later(self._snapshot_timeout_s, upload.refuse, late)
