"""The pictures of a request on their way to the engine: their bytes, their names there, and what they take of a prompt.

Owns the order of things: names first, bytes only for what the engine lacks. What a picture may be, how large it is to
the model and how several share a prompt is decided by the engine; errors in a picture are told as the client's.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from services.api.client import Engine
from services.api.errors import EngineFailed, InvalidRequest
from services.api.fetching import fetch
from services.api.pictures import Picture, decoded, scheme_of
from services.api.shown import Shown
from services.rpc import engine_pb2 as pb

MOST_PICTURES = 64  # in one request
MOST_FETCHED = 8  # from the web, in one request
FETCH_S = 20.0  # for all of them, whatever their servers do
# Threads of their own: whoever names slow servers would take all those in which prompts are rendered and tokenised.
_FETCHERS = ThreadPoolExecutor(2 * MOST_FETCHED, "fetch")
_PIECE_BYTES = 1 << 20
_Resolution = pb.PictureAsk.Resolution
RESOLUTIONS = {"low": _Resolution.LOW, "auto": _Resolution.NORMAL, "high": _Resolution.HIGH}


@dataclass(frozen=True)
class Encoded:
    """A picture's bytes as they were encoded, and their SHA-256."""

    digest: bytes
    data: bytes = field(repr=False)
    resolution: pb.PictureAsk.Resolution


async def load(pictures: Sequence[Picture], document: bool, may_fetch: bool) -> list[Encoded]:
    """The bytes of each. `document`: what asks for no resolution gets the highest. Raises InvalidRequest."""
    if len(pictures) > MOST_PICTURES:
        raise InvalidRequest(f"{len(pictures)} pictures: at most {MOST_PICTURES} in one request", "messages")
    from_web = {picture.url for picture in pictures if scheme_of(picture) == "http"}
    if from_web and not may_fetch:
        raise InvalidRequest(
            "pictures are not fetched from the web by this server: send their bytes, as data:image/...;base64,...",
            "messages",
        )
    if len(from_web) > MOST_FETCHED:
        raise InvalidRequest(
            f"{len(from_web)} pictures from the web: at most {MOST_FETCHED} in one request", "messages"
        )
    try:
        async with asyncio.timeout(FETCH_S):
            loop = asyncio.get_running_loop()
            bodies = await asyncio.gather(*(loop.run_in_executor(_FETCHERS, fetch, url) for url in from_web))
    except TimeoutError:
        raise InvalidRequest(f"the pictures could not be fetched within {FETCH_S:.0f} s", "messages") from None
    fetched = dict(zip(from_web, bodies, strict=True))

    def encoded(picture: Picture) -> Encoded:
        data = fetched[picture.url] if picture.url in fetched else decoded(picture.url)
        detail = "high" if document and picture.detail == "auto" else picture.detail
        return Encoded(hashlib.sha256(data).digest(), data, RESOLUTIONS[detail])

    return await asyncio.to_thread(lambda: [encoded(picture) for picture in pictures])


async def see(
    engine: Engine,
    pictures: Sequence[Encoded],
    text_tokens: int,
    answer_tokens: int,
    count_only: bool,
    timeout_s: float,
) -> list[Shown]:
    """What the engine makes of them. Raises ApiError; ContextTooLong if they do not fit beside the text."""
    ask = pb.VisionAsk(text_tokens=text_tokens, answer_tokens=answer_tokens, count_only=count_only)
    lacking: set[bytes] = set()
    for _ in range(3):  # another prompt's pictures may take the place of ours between two calls
        try:
            out = await engine.vision(_messages(ask, pictures, lacking), timeout_s)
        except InvalidRequest as error:
            error.param = "messages"
            raise
        if not out.missing:
            return [Shown(seen.handle, seen.tokens) for seen in out.pictures]
        if max(out.missing) >= len(pictures):
            break
        lacking |= {pictures[number].digest for number in out.missing}
    raise EngineFailed("the engine asks again and again for a picture that it was sent")


async def _messages(ask: pb.VisionAsk, pictures: Sequence[Encoded], lacking: set[bytes]) -> AsyncIterator[pb.VisionIn]:
    """The ask, then the bytes of what the engine lacks: each picture once, wherever it is shown."""
    sent: list[Encoded] = []
    del ask.pictures[:]
    for picture in pictures:
        comes = picture.digest in lacking and all(picture.digest != other.digest for other in sent)
        sent += [picture] if comes else []
        size_bytes = len(picture.data) if comes else 0
        ask.pictures.add(digest=picture.digest, resolution=picture.resolution, size_bytes=size_bytes)
    yield pb.VisionIn(ask=ask)
    for picture in sent:
        for start in range(0, len(picture.data), _PIECE_BYTES):
            yield pb.VisionIn(data=picture.data[start : start + _PIECE_BYTES])
