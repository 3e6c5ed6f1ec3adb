"""A snapshot's payload: a state as bytes, and back. Owns the format; who keeps payloads, and when, is not decided here.

A payload has two parts. Keys and values of every `block_tokens` tokens are a *block*, named by a hash
of its content: the snapshots of one dialog share them, so a later one adds only new blocks. All the rest is the state's
own part, little-endian, in this order:

    header       magic, version, model and arithmetic fingerprint, shape, tokens, size of this part: see HEADER
    ids          uint32 [tokens]
    names        of the blocks, NAME_BYTES each
    conv, ssm    float32, as in state.py
    KV           of the tokens behind the last block; for each attention layer the keys, then the values
    checksum     XXH3-64 of all bytes before it

A payload that is not exactly what this engine would write for that state is refused before it is used; its lengths are
checked against the configuration before memory is taken. Restoring is exact to the bit. Payloads travel in chunks of at
most CHUNK_BYTES (a block is one chunk), and each goes where it belongs at once: a large state is never in memory twice.
"""

import hashlib
import struct
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import xxhash

from services.engine.errors import PayloadError
from services.engine.model_config import ModelConfig
from services.engine.pages import PAGE_TOKENS
from services.engine.state import State, copy, state_bytes
from services.engine.vision.ids import FIRST

CHUNK_BYTES = 1 << 20
MAGIC = b"THIMBLE\n"
VERSION = 2
HEADER = struct.Struct("<8sI32s32s11I2Q")  # magic, version, two fingerprints, eleven sizes, tokens, size
CHECKSUM_BYTES = 8
NAME_BYTES = 16

Read = Callable[
    [memoryview, int], None
]  # fills the memory with a chunk's bytes from this one on; may raise EngineError


class PayloadFormat:
    """What payloads of one engine look like. The fingerprints are the hex texts that `Info` reports; `kv_number_bytes`
    is the size of one number of a key or value."""

    def __init__(
        self, config: ModelConfig, model_fingerprint: str, arithmetic_fingerprint: str, kv_number_bytes: int = 4
    ) -> None:
        self.config = config
        self._model = _digest(model_fingerprint)
        self._arithmetic = _digest(arithmetic_fingerprint)
        self._kv_bytes = 2 * kv_number_bytes * len(config.attention_layers) * config.kv_heads * config.head_dim
        self.block_tokens = PAGE_TOKENS
        while self.block_tokens > 1 and self.block_bytes > CHUNK_BYTES:
            self.block_tokens //= 2
        assert self.block_bytes <= CHUNK_BYTES, "the keys and values of one token are larger than a chunk"
        self.sizes = (
            len(config.mamba_layers),
            config.conv_channels,
            config.conv_kernel,
            config.mamba_heads,
            config.mamba_head_dim,
            config.mamba_state,
            len(config.attention_layers),
            config.kv_heads,
            config.head_dim,
            kv_number_bytes,
            self.block_tokens,
        )

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self._kv_bytes

    def blocks(self, tokens: int) -> int:
        """How many complete blocks such a state has. A model without attention has none."""
        return tokens // self.block_tokens if self._kv_bytes else 0

    def own_bytes(self, tokens: int) -> int:
        """Size of the own part of a state that has consumed `tokens` ids."""
        blocks = self.blocks(tokens)
        rest = (tokens - blocks * self.block_tokens) * self._kv_bytes
        return HEADER.size + 4 * tokens + NAME_BYTES * blocks + state_bytes(self.config) + rest + CHECKSUM_BYTES

    def size_bytes(self, tokens: int) -> int:
        """Of the own part and all blocks."""
        return self.own_bytes(tokens) + self.blocks(tokens) * self.block_bytes

    def name_blocks(self, state: State) -> tuple[bytes, ...]:
        """Names of its complete blocks. Each is worked out once: what a block holds never changes."""
        for index in range(len(state.block_names), self.blocks(state.tokens)):
            state.block_names.append(block_name(self._block_pieces(state, index)))
        return tuple(state.block_names)

    def dump_block(self, state: State, index: int) -> bytes:
        return b"".join(bytes(piece) for piece in self._block_pieces(state, index))  # each is valid until the next

    def dump(self, state: State, target: memoryview) -> None:
        """The own part into memory of exactly its size."""
        assert not state.spoiled
        names, end = self.name_blocks(state), len(target) - CHECKSUM_BYTES
        at = 0
        for piece in (self._header(state), array("I", state.ids).tobytes(), b"".join(names)):
            target[at : at + len(piece)] = piece
            at += len(piece)
        state.write_fixed(target[at : at + state_bytes(self.config)])
        at += state_bytes(self.config)
        if at < end:
            for rest in state.export_kv(len(names) * self.block_tokens, state.tokens):
                copy(target[at : at + len(rest)], rest)
                at += len(rest)
        target[end:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(target[:end]))

    def load(self, own_part: memoryview, blocks: Sequence[bytes], state: State) -> None:
        """Fill an empty state with what `dump` and `dump_block` of this process gave: nothing is looked at again.
        Raises OutOfPagesError, and then nothing has changed."""
        tokens, fixed_bytes = self.check_header(bytes(own_part[: HEADER.size]), state), state_bytes(self.config)
        state.reserve(tokens)
        names_at = HEADER.size + 4 * tokens
        fixed_at = names_at + NAME_BYTES * len(blocks)
        rest_at = fixed_at + fixed_bytes
        state.read_fixed(own_part[fixed_at:rest_at])
        for index, block in enumerate(blocks):
            state.read_block(*self.span(index), block)
        if rest_at < len(own_part) - CHECKSUM_BYTES:
            state.read_block(len(blocks) * self.block_tokens, tokens, own_part[rest_at:-CHECKSUM_BYTES])
        ids = array("I")
        ids.frombytes(own_part[HEADER.size : names_at])
        state.ids = ids.tolist()
        state.block_names = _names(own_part[names_at:fixed_at])

    def span(self, index: int) -> tuple[int, int]:
        """The tokens of a block."""
        return index * self.block_tokens, (index + 1) * self.block_tokens

    def check_header(self, header: bytes, state: State) -> int:
        """The number of tokens, if it is the header of a payload that `state` can be filled with."""
        magic, version, model, arithmetic, *sizes, tokens, size = HEADER.unpack(header)
        if magic != MAGIC:
            raise PayloadError(f"snapshot: starts with {magic!r}, expected {MAGIC!r}; it is not a snapshot")
        if version != VERSION:
            raise PayloadError(f"snapshot: format version {version}, this engine reads {VERSION}; discard it")
        if model != self._model:
            raise PayloadError("snapshot: of another model (its fingerprint differs); discard it")
        if arithmetic != self._arithmetic:
            raise PayloadError("snapshot: of another arithmetic (kernels or versions differ); discard it")
        if tuple(sizes) != self.sizes:
            raise PayloadError(f"snapshot: sizes {sizes}, expected {list(self.sizes)}; it is damaged")
        if tokens > state.most_tokens:
            raise PayloadError(f"snapshot: {tokens} tokens, this engine holds at most {state.most_tokens}")
        if size != self.own_bytes(tokens):
            raise PayloadError(f"snapshot: {size} bytes, expected {self.own_bytes(tokens)}; it is damaged")
        return int(tokens)

    def check_ids(self, data: bytes) -> list[int]:
        ids = array("I")
        ids.frombytes(data)
        words = [id_ for id_ in ids if id_ < FIRST]
        if words and max(words) >= self.config.vocab_size:
            raise PayloadError(f"snapshot: id {max(words)} is outside the vocabulary of {self.config.vocab_size}")
        return ids.tolist()

    def _header(self, state: State) -> bytes:
        tokens = state.tokens
        return HEADER.pack(MAGIC, VERSION, self._model, self._arithmetic, *self.sizes, tokens, self.own_bytes(tokens))

    def _block_pieces(self, state: State, index: int) -> Iterator[memoryview]:
        return state.export_kv(*self.span(index))


class Loader:
    """Fills an empty state from a payload, piece by piece as it arrives. Raises PayloadError for what is no payload of
    this engine and OutOfPagesError if there is no room; then `state` holds rubbish and has to be reset.

    First `feed` the own part; then `names` are known, and each block that is `missing` is to be put.
    """

    def __init__(self, form: PayloadFormat, state: State, tokens: int | None = None) -> None:
        """`tokens`: how many the state has that was offered, where there was an offer. What claims others is refused
        before it gets room: the sequence would have more pages than there are places for in a card's tables."""
        self.names: tuple[bytes, ...] = ()
        self._form = form
        self._state = state
        self._offered_tokens = tokens
        self._digest: Any = xxhash.xxh3_64()
        self._own_part_done = False
        self._hashed = True  # whether the target under way counts for the checksum
        self._targets = self._own_part()
        self._target: memoryview | None = memoryview(b"")
        self._filled = 0
        self._missing: set[int] = set()
        self._next_target()

    @property
    def own_part_done(self) -> bool:
        return self._own_part_done

    @property
    def room(self) -> memoryview | None:
        """Where the next bytes belong, of the own part or of the block that was begun; None: it is whole."""
        return None if self._target is None else self._target[self._filled :]

    @property
    def missing(self) -> list[int]:
        return sorted(self._missing)

    def feed(self, chunk: bytes | memoryview) -> None:
        """More of the own part."""
        source = memoryview(chunk)
        self.fill(len(chunk), lambda view, at: copy(view, source[at : at + len(view)]))

    def fill(self, size: int, read: Read) -> None:
        """The next `size` bytes of the own part, which `read` puts where they belong."""
        if not 0 < size <= CHUNK_BYTES:
            raise PayloadError(f"snapshot: a chunk of {size} bytes, expected 1 to {CHUNK_BYTES}")
        done = 0
        while done < size:
            if self.room is None:
                raise PayloadError("snapshot: bytes follow its end; it is damaged")
            view = self.room[: size - done]
            read(view, done)
            done += len(view)
            self.advance(len(view))

    def advance(self, count: int) -> None:
        """So many bytes are in `room` now."""
        assert self._target is not None
        if self._hashed:
            # What was taken over, and not what it was taken from: that may be memory of another process.
            self._digest.update(self._target[self._filled : self._filled + count])
        self._filled += count
        if self._filled == len(self._target):
            self._next_target()

    def begin_block(self, index: int) -> None:
        """What comes next is a block of the state."""
        if index not in self._missing or self._target is not None:
            raise PayloadError(f"snapshot: block {index} is not one that is missing")
        self._targets = self._block(index)
        self._next_target()

    def put_block(self, index: int, data: bytes | memoryview) -> None:
        """A block of the state."""
        self.begin_block(index)
        if len(data) != self._form.block_bytes:
            raise PayloadError(f"snapshot: block {index} is not what its name says; it is damaged")
        self.feed(data)

    def finish(self) -> None:
        """Everything is there, and the state is what was dumped. Raises PayloadError if something is not."""
        if self._target is not None:
            raise PayloadError(f"snapshot: ends {len(self._target) - self._filled} bytes or more too early")
        if self._missing:
            raise PayloadError(f"snapshot: {len(self._missing)} of its {len(self.names)} blocks are missing")

    def _own_part(self) -> Iterator[memoryview]:
        """The memory to be filled, in order. Goes on when a piece is full."""
        form, state = self._form, self._state
        header = bytearray(HEADER.size)
        yield memoryview(header)
        tokens = form.check_header(bytes(header), state)
        if self._offered_tokens not in (None, tokens):
            raise PayloadError("snapshot: it holds another state than the one that was offered")
        state.reserve(tokens)
        ids, names = bytearray(4 * tokens), bytearray(NAME_BYTES * form.blocks(tokens))
        yield memoryview(ids)
        yield memoryview(names)
        yield from state.import_fixed()
        blocks = form.blocks(tokens)
        checked = form.check_ids(bytes(ids))
        if tokens > blocks * form.block_tokens and form.block_bytes:
            yield from state.import_kv(blocks * form.block_tokens, tokens)
        stored = bytearray(CHECKSUM_BYTES)
        self._hashed = False
        yield memoryview(stored)
        if struct.pack("<Q", self._digest.intdigest()) != stored:
            raise PayloadError("snapshot: the checksum does not match; it is damaged")
        self.names = tuple(_names(names))
        self._missing = set(range(blocks))
        state.ids = checked
        state.block_names = list(self.names)
        self._own_part_done = True

    def _block(self, index: int) -> Iterator[memoryview]:
        self._digest, self._hashed = xxhash.xxh3_128(), True
        yield from self._state.import_kv(*self._form.span(index))
        if self._digest.digest() != self.names[index]:
            raise PayloadError(f"snapshot: block {index} is not what its name says; it is damaged")
        self._missing.remove(index)

    def _next_target(self) -> None:
        while True:
            self._target, self._filled = next(self._targets, None), 0
            if self._target is None or len(self._target):
                return


def block_name(pieces: Iterable[bytes | memoryview]) -> bytes:
    """NAME_BYTES bytes; equal names, equal content."""
    digest = xxhash.xxh3_128()
    for piece in pieces:
        digest.update(piece)
    return digest.digest()


def state_id(arithmetic_fingerprint: str, ids: Sequence[int], blocks: Sequence[bytes]) -> bytes:
    """The name of a state that has consumed `ids`, 32 bytes. Equal names: the same ids, read by the same arithmetic,
    and the same bits in all complete blocks of keys and values.

    Where an arithmetic has one path, as on the CPU, ids and arithmetic decide every bit, and equal names are equal
    bits. On a GPU long pieces of a prompt are swept and short ones decoded, so the bits depend also on where the pieces
    began, within the bound that both paths keep. Therefore the blocks are in the name: own part and blocks of one name
    belong together, whoever wrote them. What is left to differ is the own part, and a payload has it as a whole.
    """
    digest = hashlib.blake2b(arithmetic_fingerprint.encode() + b"\0", digest_size=32)
    digest.update(struct.pack("<Q", len(ids)) + array("I", ids).tobytes())
    digest.update(b"".join(blocks))
    return digest.digest()


def _names(joined: bytes | bytearray | memoryview) -> list[bytes]:
    return [bytes(joined[at : at + NAME_BYTES]) for at in range(0, len(joined), NAME_BYTES)]


def _digest(fingerprint: str) -> bytes:
    return hashlib.blake2b(fingerprint.encode(), digest_size=32).digest()
