"""From encoded pictures to embeddings that prompts can name: the engine's side of a Vision call.

Sizes first, from headers alone: how many tokens each picture will take follows from them, and what does not fit is
refused before anything is computed. Then what is not held yet is decoded, cut into patches and handed to the engine's
thread, a block of the tower between two of its steps. One picture is worked on at a time, so that memory is bounded.
Runs on the server's loop.
"""

import asyncio
import enum
import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from services.engine.errors import ContextError, PictureError, QueueFullError
from services.engine.vision.cache import PictureCache
from services.engine.vision.config import VisionConfig
from services.engine.vision.decode import MOST_PIXELS, MOST_SIDE
from services.engine.vision.decoder import Decoder
from services.engine.vision.embedding import embed
from services.engine.vision.grid import share, tokens
from services.engine.vision.looks import Work
from services.engine.vision.preprocess import patches
from services.engine.vision.weights import VisionWeights

MOST_PICTURES = 64  # in one prompt
MOST_CALLS = 8  # that wait with their pictures' bytes
MOST_KNOWN = 4096  # pictures whose sizes are remembered; a hundred bytes each
_SPARE_TOKENS = 4  # as the family's processors leave
_FLOAT_BYTES = 4

Read = Callable[[Tensor, tuple[int, int]], Work]  # patches and their grid, as embedding.embed takes them
Look = Callable[[Work], "Future[Tensor]"]  # has the engine's thread do the work, piece by piece


class Resolution(enum.Enum):
    """How closely a picture is looked at. The values are the contract's."""

    NORMAL = 0
    LOW = 1
    HIGH = 2

    def most_patches(self, config: VisionConfig) -> int:
        limits = {Resolution.LOW: config.least_patches, Resolution.NORMAL: config.normal_patches}
        return limits.get(self, config.most_patches)


@dataclass(frozen=True)
class Ask:
    """A picture by the SHA-256 of its encoded bytes, and the bytes where the client sends them."""

    digest: bytes
    resolution: Resolution
    data: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Room:
    """What a prompt's pictures may take: the context, less its text, less what is to be left for the answer."""

    context_tokens: int
    text_tokens: int
    answer_tokens: int


@dataclass(frozen=True)
class Seen:
    """A picture's embeddings by their name; without a name where only its tokens were asked for."""

    handle: bytes
    tokens: int


@dataclass(frozen=True)
class Missing:
    """Numbers of the pictures whose bytes are needed."""

    numbers: tuple[int, ...]


@dataclass
class _Known:
    size: tuple[int, int]  # width, height
    pixels: bytes = b""  # a hash of them, once they were decoded


class Sight:
    """One for an engine whose model sees. Belongs to the server's loop, but for the cache."""

    def __init__(
        self, weights: VisionWeights, cache: PictureCache, count: Callable[[str], None], read: Read | None = None
    ) -> None:
        """`count` hears of each picture whether it was "held" or had to be "read". `read`: by the processor, if none
        is given."""
        self.weights = weights
        self.cache = cache
        self._read = read or partial(embed, weights)
        self._count = count
        self._decoder = Decoder()
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._turn = asyncio.Semaphore(1)
        self._calls = 0

    async def see(self, asks: Sequence[Ask], room: Room, look: Look, count_only: bool = False) -> list[Seen] | Missing:
        """Raises PictureError, ContextError or QueueFullError."""
        if not 0 < len(asks) <= MOST_PICTURES:
            raise PictureError(f"{len(asks)} pictures: a prompt may have 1 to {MOST_PICTURES}")
        sent = {ask.digest: ask.data for ask in asks if ask.data is not None}
        asks = [replace(ask, data=sent.get(ask.digest)) for ask in asks]  # one is sent once, wherever it is shown
        if self._calls >= MOST_CALLS:
            raise QueueFullError(f"{self._calls} requests with pictures wait already: ask again later")
        self._calls += 1
        try:
            return await self._see(asks, room, look, count_only)
        finally:
            self._calls -= 1

    async def _see(self, asks: Sequence[Ask], room: Room, look: Look, count_only: bool) -> list[Seen] | Missing:
        found = await self._learn_sizes(asks)
        if isinstance(found, Missing):
            return found
        grids = self._grids(asks, found, room)
        if count_only:
            return [Seen(b"", tokens(grid)) for grid in grids]
        held = [self.cache.find((known.pixels, grid)) for known, grid in zip(found, grids, strict=True)]
        missing = [i for i, (ask, entry) in enumerate(zip(asks, held, strict=True)) if not (entry or ask.data)]
        if missing:
            return Missing(tuple(missing))
        async with self._turn:
            return [await self._look(*one, look) for one in zip(asks, found, grids, strict=True)]

    async def _learn_sizes(self, asks: Sequence[Ask]) -> list[_Known] | Missing:
        """What is known of each picture."""
        new = {ask.digest: ask.data for ask in asks if ask.data is not None and ask.digest not in self._known}
        for digest, data in new.items():
            if hashlib.sha256(data).digest() != digest:
                raise PictureError("a picture's bytes are not those that its digest names: send it again")
        found = {ask.digest: self._known[ask.digest] for ask in asks if ask.digest in self._known}
        if new:
            sizes = await self._decoder.sizes(list(new.values()))
            found |= {digest: _Known(size) for digest, size in zip(new, sizes, strict=True)}
        for digest, known in found.items():
            self._known[digest] = known
            self._known.move_to_end(digest)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        missing = tuple(i for i, ask in enumerate(asks) if ask.digest not in found)
        return Missing(missing) if missing else [found[ask.digest] for ask in asks]

    def _grids(self, asks: Sequence[Ask], found: Sequence[_Known], room: Room) -> list[tuple[int, int]]:
        config = self.weights.config
        room_tokens = room.context_tokens - room.text_tokens - room.answer_tokens - _SPARE_TOKENS
        most = [ask.resolution.most_patches(config) for ask in asks]
        grids = share([known.size for known in found], config.patch, config.least_patches, most, room_tokens)
        in_all = sum(map(tokens, grids))
        if in_all + room.text_tokens >= room.context_tokens:
            raise ContextError(
                f"{in_all} tokens of {len(asks)} pictures and {room.text_tokens} of text do not fit the context of "
                f"{room.context_tokens}, answer included: send fewer pictures or less text"
            )
        size_bytes = in_all * config.hidden * _FLOAT_BYTES
        if size_bytes > self.cache.budget_bytes:
            raise PictureError(
                f"{len(asks)} pictures take {size_bytes} bytes, more than the {self.cache.budget_bytes} that are kept "
                "of pictures: send fewer or smaller ones, or raise THIMBLE_ENGINE_PICTURE_CACHE_GB"
            )
        return grids

    async def _look(self, ask: Ask, known: _Known, grid: tuple[int, int], look: Look) -> Seen:
        entry = self.cache.find((known.pixels, grid))
        self._count("read" if entry is None else "held")
        if entry is None:
            if ask.data is None:
                raise QueueFullError("a picture's embeddings gave way to others' just now: ask again")
            cut = await self._patches(ask.data, known, grid)
            key = (known.pixels, grid)
            entry = self.cache.find(key)
            if entry is None:
                rows = await asyncio.wrap_future(look(self._read(cut, grid)))
                entry = await asyncio.to_thread(self.cache.put, key, rows)
        return Seen(entry.handle, len(entry.rows))

    async def _patches(self, data: bytes, known: _Known, grid: tuple[int, int]) -> Tensor:
        width, height, pixels = await self._decoder.pixels(data)
        config = self.weights.config

        def cut() -> tuple[bytes, Tensor]:
            digest = hashlib.blake2b(f"{width} {height} ".encode(), digest_size=32)
            digest.update(pixels)
            image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(height, width, 3)
            with torch.inference_mode():
                return digest.digest(), patches(image, grid, config.patch, config.mean, config.std)

        known.pixels, found = await asyncio.to_thread(cut)
        return found


def reading_bytes(config: VisionConfig, on_device: bool = False) -> int:
    """The most that one picture takes while it is read: to decode it, or tower and projector at its full grid.

    `on_device`: the two are there, and only patches and results are here.
    """
    # The decoder holds four bytes a pixel twice; here three, twice; and its columns are as narrow as the grid already.
    narrow = MOST_SIDE * 4 * config.patch * math.isqrt(config.most_patches)
    decoding = (8 + 6) * MOST_PIXELS + 3 * narrow
    if on_device:
        here = 2 * config.most_patches * 3 * config.patch**2 + config.most_patches // 2 * config.hidden
        return max(decoding, _FLOAT_BYTES * here)
    rows = config.most_patches + config.prefix
    tower = rows * (8 * config.width + 3 * config.patch**2) + 2048 * 2 * config.inner
    block = 4 * config.width**2 + 2 * config.width * config.inner
    projector = 2 * config.projector * (4 * config.width + config.hidden)
    return max(decoding, _FLOAT_BYTES * (tower + 2 * block + config.table**2 * config.width) + projector)
