"""One Vision call: the ask, the bytes that come with it, and what is answered. Owns how much a call may send."""

import asyncio
from typing import Any

import grpc

from services.engine.engine import Engine
from services.engine.errors import PictureError, StreamError
from services.engine.vision.decode import MOST_BYTES
from services.engine.vision.sight import Ask, Missing, Resolution
from services.rpc import engine_pb2 as pb
from services.unbroken import Reads

MOST_CALL_BYTES = 64 << 20
RECEIVE_S = 60.0
EOF = grpc.aio.EOF  # type: ignore[attr-defined]


async def answer(engine: Engine, messages: Reads) -> pb.VisionOut:
    """Raises EngineError: StreamError for what is out of order, and what `Engine.sight` and `Engine.see` raise."""
    _ = engine.sight
    try:
        async with asyncio.timeout(RECEIVE_S):
            ask, asks = await _receive(messages)
    except TimeoutError:
        raise StreamError(f"the pictures did not come within {RECEIVE_S:.0f} s") from None
    found = await engine.see(asks, ask.text_tokens, ask.answer_tokens, ask.count_only)
    if isinstance(found, Missing):
        return pb.VisionOut(missing=found.numbers)
    return pb.VisionOut(pictures=[pb.SeenPicture(handle=seen.handle, tokens=seen.tokens) for seen in found])


async def _receive(messages: Reads) -> tuple[Any, list[Ask]]:
    ask: Any = None
    data = bytearray()
    while (message := await messages.next()) is not EOF:
        if ask is None:
            if not message.HasField("ask"):
                raise StreamError("the first message of a Vision stream is an ask")
            ask = message.ask
            _check_sizes(ask)
        elif message.HasField("ask"):
            raise StreamError("a Vision stream has one ask")
        data += message.data
        if len(data) > sum(picture.size_bytes for picture in ask.pictures):
            raise StreamError("more bytes than the ask's pictures have")
    if ask is None or len(data) != sum(picture.size_bytes for picture in ask.pictures):
        raise StreamError("the stream ended before all pictures of its ask had come")
    asks, start = [], 0
    for picture in ask.pictures:
        end = start + picture.size_bytes
        own = bytes(data[start:end]) if picture.size_bytes else None
        asks.append(Ask(picture.digest, Resolution(picture.resolution), own))
        start = end
    return ask, asks


def _check_sizes(ask: Any) -> None:
    """Before the bytes are received."""
    sizes = [picture.size_bytes for picture in ask.pictures]
    if max(sizes, default=0) > MOST_BYTES:
        raise PictureError(f"a picture has {max(sizes)} bytes: at most {MOST_BYTES} are taken")
    if sum(sizes) > MOST_CALL_BYTES:
        raise PictureError(f"the pictures have {sum(sizes)} bytes: at most {MOST_CALL_BYTES} are taken at once")
    known = set(pb.PictureAsk.Resolution.values())
    if any(picture.resolution not in known or len(picture.digest) != 32 for picture in ask.pictures):
        raise StreamError("a picture is asked for by its SHA-256 and one of the contract's resolutions")
