"""`thimble bench api`: what the api adds to a token on its way from the engine to the client.

A real api process between a paced engine and raw HTTP clients in this process. A token's time is from when the engine
hands it to gRPC until a client has read its event: both transports, and all that the api does. What the api adds is
that less the time straight from the engine to as many gRPC clients here. All streams get their tokens at the same
moment, as from an engine's step, so the last one of a step waits for the others.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from services.api.tokens import load_tokenizer
from services.rpc import engine_pb2 as pb
from services.rpc.engine_pb2_grpc import EngineStub
from services.tools import figures
from services.tools.amounts import amount, count, whole
from services.tools.child import Child
from services.tools.paced_engine import LISTENING, SILENT
from services.tools.stack import StackError

WARM_UP_TOKENS = 10  # of each stream, not counted
START_S = 60
DATA = b"data: "
MODEL_DIR = Path(__file__).parents[2] / "demo"
WORD = " the"  # that every token says: one id in any English vocabulary

Row = tuple[str, float, str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=whole, default=8, help="that get tokens at once (default: 8)")
    parser.add_argument(
        "--silent", type=count, default=200, help="open streams without tokens beside one (default: 200)"
    )
    parser.add_argument("--tokens", type=whole, default=200, help="of each stream (default: 200)")
    parser.add_argument("--rate", type=amount, default=25, help="tokens a second of each stream (default: 25)")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")


def run(args: argparse.Namespace) -> int:
    for name, value, unit, note in measure(args.streams, args.silent, args.tokens, args.rate):
        print(f"{name:28} {value:8.3f} {unit:6} {note}")
        if args.out:
            figures.append(args.out, name, value, unit, note)
    return 0


def measure(streams: int, silent: int, tokens: int, rate: float) -> list[Row]:
    """Raises StackError if a process does not start or a stream is not what it must be."""
    [token_id, *_] = load_tokenizer(MODEL_DIR / "tokenizer.json").encode(WORD)
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as running:
        folder = Path(name)
        engine = running.enter_context(
            process("services.tools.paced_engine", str(token_id), str(1 / rate), folder=folder)
        )
        environ = {
            "THIMBLE_API_MODEL_DIR": str(MODEL_DIR),
            "THIMBLE_API_ENGINES": address(engine),
            "THIMBLE_API_PORT": "0",
            "THIMBLE_API_REDIS_URL": "",
        }
        api = running.enter_context(process("services.api", folder=folder, **environ))
        port = int(address(api).rpartition(":")[2])
        return asyncio.run(Bench(engine, port, tokens).rows(streams, silent, rate))


@dataclass
class Bench:
    engine: Child
    port: int
    tokens: int
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def rows(self, streams: int, silent: int, rate: float) -> list[Row]:
        many = await self.overheads_ms(streams)
        straight = statistics.median(await self.straight_ms(streams))
        alone = await self.overheads_ms(1)
        async with self.silent_streams(silent):
            beside = await self.overheads_ms(1)
        alone += await self.overheads_ms(1)
        note = f"{streams} streams, {rate:g} tokens/s each, {conditions()}"
        return [
            ("api.overhead_ms_p50", statistics.median(many) - straight, "ms", f"less straight from the engine; {note}"),
            ("api.token_ms_p50", statistics.median(many), "ms", f"engine to client through the api; {note}"),
            ("api.token_ms_p95", sorted(many)[int(0.95 * len(many))], "ms", f"the same; {note}"),
            ("api.straight_ms_p50", straight, "ms", f"engine to gRPC clients without the api; {note}"),
            ("api.token_one_ms_p50", statistics.median(alone), "ms", f"through the api, one stream, {conditions()}"),
            (
                "api.silent_ratio",
                statistics.median(beside) / statistics.median(alone),
                "ratio",
                f"p50 of one stream beside {silent} without tokens, over its p50 alone",
            ),
        ]

    async def overheads_ms(self, streams: int) -> list[float]:
        """Through the api, of every token after the first ones, of `streams` answers at once."""
        return await self.times_ms(streams, self.read_stream)

    async def straight_ms(self, streams: int) -> list[float]:
        """The same from the engine itself."""
        async with grpc.aio.insecure_channel(address(self.engine)) as channel:
            stub = EngineStub(channel)

            async def read(name: str) -> list[float]:
                start = pb.Start(request_id=name, ids=[1], max_tokens=self.tokens)
                call = stub.Generate(iter([pb.GenerateIn(start=start)]))
                return [time.perf_counter() async for out in call if out.HasField("token")]

            return await self.times_ms(streams, read)

    async def times_ms(self, streams: int, read: Callable[[str], Awaitable[list[float]]]) -> list[float]:
        names = [f"paced-{next(self._numbers)}" for _ in range(streams)]
        arrived_s = await asyncio.gather(*(read(name) for name in names))
        sent_s = sent(self.engine)
        found = []
        for name, times_s in zip(names, arrived_s, strict=True):
            if len(times_s) != self.tokens:
                raise StackError(f"the api sent {len(times_s)} events with text for {self.tokens} tokens")
            pairs = zip(sent_s[name], times_s, strict=True)
            found += [(there - here) * 1e3 for here, there in pairs][WARM_UP_TOKENS:]
        return found

    async def read_stream(self, name: str) -> list[float]:
        """time.perf_counter() of each event that has the word."""
        reader, writer = await self.ask(name)
        times_s = []
        word = f'"content":"{WORD}"'.encode()
        while line := await reader.readline():
            if line.startswith(DATA) and word in line:
                times_s.append(time.perf_counter())
            elif line.startswith(DATA + b"[DONE]"):
                break
        writer.close()
        await writer.wait_closed()
        return times_s

    async def ask(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A streamed chat, its headers read."""
        messages = [{"role": "user", "content": "Hello"}]
        chat = {"model": "paced", "messages": messages, "max_tokens": self.tokens, "stream": True}
        body = json.dumps(chat).encode()
        headers = ("Host: bench", "Content-Type: application/json", f"X-Request-Id: {name}")
        head = "\r\n".join(("POST /v1/chat/completions HTTP/1.1", *headers, f"Content-Length: {len(body)}", "", ""))
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            writer.close()
            await writer.wait_closed()
            raise StackError(f"the api answered {status.decode().strip()}")
        while (await reader.readline()).strip():
            pass
        return reader, writer

    @contextlib.asynccontextmanager
    async def silent_streams(self, count: int) -> AsyncIterator[None]:
        asked = await asyncio.gather(*(self.ask(f"{SILENT}{number}") for number in range(count)))
        try:
            yield
        finally:
            for _, writer in asked:
                writer.close()
                await writer.wait_closed()
            await asyncio.sleep(1)  # until they are gone from api and engine too


@contextlib.contextmanager
def process(module: str, *arguments: str, folder: Path, **environ: str) -> Iterator[Child]:
    command = (sys.executable, "-m", module, *arguments)
    child = Child(module, command, os.environ | environ, folder / f"{module}.log")
    try:
        yield child
    finally:
        child.stop(10)


def address(child: Child) -> str:
    """Where it listens, once it does."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and not child.ended():
        for line in child.log.read_text().splitlines():
            if line.startswith(LISTENING):
                return line.removeprefix(LISTENING)
        time.sleep(0.05)
    raise StackError(f"{child.name} did not start:\n" + "\n".join(child.last_lines(20)))


def conditions() -> str:
    """What else the machine does, and whether it has to wait for us."""
    priority = ", real-time priority" if os.sched_getscheduler(0) == os.SCHED_FIFO else ""
    return f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores{priority}"


def sent(engine: Child) -> dict[str, list[float]]:
    """When the tokens of each complete answer were sent."""
    told = [json.loads(line) for line in engine.log.read_text().splitlines() if line.startswith("{")]
    return {one["request_id"]: one["sent_s"] for one in told}
