"""How long a dialog of the real model's shape takes to come back: from Redis, beside a raw read of the same bytes from
the same Redis, and from the engine's memory; and whether two dialogs alternating in one Redis keep being found.

Api code and engine are two processes, as in the product; the network computes nothing (snapshot_engine.py). With
--device cuda the engine's states are in a card's memory, as they are there in the product.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import numpy.typing as npt

from services.api.client import Engine
from services.api.embedded import EmbeddedStore
from services.api.exchange import Exchange
from services.api.records import Head, Record
from services.api.store import CHUNK_BYTES, Store
from services.engine.exchange import Lent
from services.rpc import engine_pb2 as pb
from services.tools import figures
from services.tools.amounts import count, whole

ROOT = Path(__file__).parents[2]
SYSTEM = {"role": "system", "content": "You are a very patient assistant who explains things slowly, in many words."}
MEMORY = Path("/dev/shm")  # where a folder costs no disk


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")
    parser.add_argument("--tokens", type=whole, default=1000, help="of the dialog (default: %(default)s)")
    parser.add_argument("--runs", type=whole, default=7, help="of each; the median counts (default: %(default)s)")
    parser.add_argument(
        "--turns", type=count, default=5, help="of each alternating dialog; 0: none (default: %(default)s)"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where states are (default: cpu)")
    parser.add_argument("--redis", default="", help="URL (unix:// or redis://); default: an embedded server of 1 GB")


def run(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        engine = partial(_engine, exchange_dir=folder, device=args.device)
        with _redis(args.redis) as url, engine(0.0) as cold, engine(2.0) as hot:
            rows = asyncio.run(_measure(url, hot, cold, args.tokens, args.runs, Exchange(folder)))
        if args.turns:
            with _redis(args.redis) as url, engine(0.0) as cold, _api(cold, url, folder) as api:
                rows.append(_alternate(api, args.turns))
    for name, value, unit, note in rows:
        print(f"{name:34} {value:8.4f} {unit:5} {note}")
        if args.out:
            figures.append(args.out, name, value, unit, f"{note}; states on {args.device}, network without arithmetic")
    return 0


async def _measure(
    url: str, hot: str, cold: str, tokens: int, runs: int, exchange: Exchange
) -> list[tuple[str, float, str, str]]:
    """`hot` and `cold` are addresses of an engine that keeps states and of one that keeps none."""
    store = Store(url, 10.0, 3600)
    keeping, forgetting = Engine(hot), Engine(cold)
    ids = [n % 4000 for n in range(tokens)]
    try:
        await _take(keeping, store, ids[:10])  # compiles what has to be compiled
        began = time.perf_counter()
        record = await _take(keeping, store, ids)
        stored_s = time.perf_counter() - began
        size_bytes = record.head.size_bytes + record.head.blocks * record.head.block_bytes
        raw, restored, over_grpc, held, copied = [], [], [], [], []
        source, target = (np.full(size_bytes, n, np.uint8) for n in (1, 2))
        for _ in range(runs):  # in turns, so that a busy moment of the machine hits all of them
            raw.append(await asyncio.to_thread(_raw_read, store, record))
            copied.append(await asyncio.to_thread(_copy, target, source))
            restored.append(await _restore(forgetting, ids, record, store, exchange))
            over_grpc.append(await _restore(forgetting, ids, record, store, None))
            held.append(await _restore(keeping, ids, record, None, None))
    finally:
        await asyncio.gather(keeping.close(), forgetting.close(), store.close())
    note = f"{size_bytes / 1e6:.0f} MB, {tokens} tokens, median of {runs} runs in turns"
    ratio = statistics.median(restored) / statistics.median(raw)
    over_copy = statistics.median(held) / statistics.median(copied)
    return [
        ("snapshot.raw_read_s", statistics.median(raw), "s", f"{note}; the same code, into one buffer"),
        ("snapshot.restore_redis_s", statistics.median(restored), "s", f"{note}; request to restored state"),
        ("snapshot.restore_redis_over_raw", ratio, "ratio", f"{note}; best of each {min(restored) / min(raw):.2f}"),
        ("snapshot.restore_grpc_s", statistics.median(over_grpc), "s", f"{note}; the same without an exchange folder"),
        ("snapshot.restore_hot_s", statistics.median(held), "s", f"{note}; best {min(held):.4f}"),
        (
            "snapshot.copy_s",
            statistics.median(copied),
            "s",
            f"{note}; one copy of the same bytes, best {min(copied):.4f}",
        ),
        ("snapshot.restore_hot_over_copy", over_copy, "ratio", f"{note}; best of each {min(held) / min(copied):.2f}"),
        ("snapshot.store_s", stored_s, "s", f"{note}; one run, with reading the prompt"),
    ]


async def _take(engine: Engine, store: Store, ids: Sequence[int]) -> Record:
    """Read a prompt and store its state, as the api does."""
    generation = engine.generate(120)
    await generation.start(pb.Start(ids=[*ids, 1], max_tokens=1, snapshot_at=[len(ids)], snapshots_on_request=True))
    messages = generation.messages()
    async for message in messages:
        if message.WhichOneof("message") == "snapshot":
            break
    state, chunks = message.snapshot.state, message.snapshot.chunks
    head = Head(state.state_id, len(ids), len(ids), state.size_bytes, chunks, len(state.blocks), state.block_bytes)
    record = Record(head, array("I", ids), tuple(state.blocks))
    own_part, blocks = await store.lacks(record)
    await generation.want(own_part, blocks)

    async def data() -> "Iterator[bytes]":  # type: ignore[misc]  # an async generator
        for _ in range(own_part * chunks + len(blocks)):
            yield (await anext(messages)).chunk.data

    await store.write(record, own_part, blocks, data())  # type: ignore[arg-type]
    generation.cancel()
    return record


async def _restore(
    engine: Engine, ids: Sequence[int], record: Record, store: Store | None, exchange: Exchange | None
) -> float:
    """Seconds from the request to the restored state; from the engine's memory if there is no store, and over gRPC if
    there is no exchange."""
    head = record.head
    offer = pb.StateRef(state_id=head.state_id, tokens=head.tokens, blocks=record.blocks)
    if store is not None:
        offer.size_bytes = head.size_bytes
    generation = engine.generate(120)
    began = time.perf_counter()
    await generation.start(pb.Start(ids=[*ids, 1], max_tokens=1, offers=[offer]))
    async for message in generation.messages():
        if message.restore.source == pb.Restore.SEND and store is not None:
            payload = store.bulk(record, message.restore.need)
            if exchange is None or payload is None:
                await generation.send_payload(store.read(record, message.restore.need))
            else:
                await exchange.lend(generation, payload)
        elif message.WhichOneof("message") == "restore":
            break
    seconds = time.perf_counter() - began
    expected = pb.Restore.HOT if store is None else pb.Restore.SENT
    assert message.restore.source == expected, message.restore
    generation.cancel()
    await asyncio.sleep(0.05)  # the engine frees what it held
    return seconds


def _raw_read(store: Store, record: Record) -> float:
    """The same bytes by the same code, received into one buffer and thrown away."""
    payload = store.bulk(record, range(len(record.blocks)))
    assert payload is not None
    buffer, left = memoryview(bytearray(CHUNK_BYTES)), sum(payload.sizes)
    began = time.perf_counter()
    lent = Lent(payload.connect(), payload.requests, payload.sizes, lambda: None)
    while left:
        left -= lent.read(buffer)
    seconds = time.perf_counter() - began
    lent.close()
    return seconds


def _copy(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> float:
    """The least that a restore from memory can take: one copy, into memory that is in use."""
    began = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - began


def _alternate(url: str, turns: int) -> tuple[str, float, str, str]:
    """Two dialogs take turns; the engine keeps nothing, so what is found is in the Redis that holds both."""
    dialogs = [[SYSTEM, {"role": "user", "content": f"This is dialog number {n} of two."}] for n in range(2)]
    found = 0
    with httpx.Client(base_url=url, timeout=300) as client:
        for turn in range(turns):
            for dialog in dialogs:
                reply = client.post("/v1/chat/completions", json={"model": "synthetic", "messages": dialog}).json()
                found += bool(turn and reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 40)
                dialog += [reply["choices"][0]["message"], {"role": "user", "content": f"And question {turn}?"}]
                time.sleep(3)  # a person reads the answer; meanwhile its states are stored
    asked = 2 * (turns - 1)
    return "snapshot.alternating_found", found / asked, "share", f"{found} of {asked} turns, two dialogs in 1 GB"


@contextmanager
def _redis(url: str) -> Iterator[str]:
    if url:
        yield url
        return
    with EmbeddedStore(1000) as store:
        yield store.url


@contextmanager
def _engine(hot_gb: float, exchange_dir: str, device: str) -> Iterator[str]:
    """Its address."""
    command = [sys.executable, "-m", "services.tools.snapshot_engine", str(hot_gb), exchange_dir, device]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.communicate()


@contextmanager
def _api(engine: str, redis_url: str, exchange_dir: str) -> Iterator[str]:
    """The URL of an api."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("THIMBLE_")}
    settings = {"MODEL_DIR": str(ROOT / "demo"), "ENGINES": engine, "REDIS_URL": redis_url, "PORT": "0"}
    settings["EXCHANGE_DIR"] = exchange_dir
    environ |= {f"THIMBLE_API_{key}": value for key, value in settings.items()}
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "services.api"]
        with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=log, text=True) as process:
            assert process.stdout is not None
            try:
                yield next(word for line in process.stdout for word in line.split() if word.startswith("http://"))
            finally:
                process.terminate()
