"""A snapshot's payload: a state as bytes, and back. Owns the format; who keeps payloads, and when, is not decided here.

Everything is little-endian, in this order:

    header       magic, version, model and arithmetic fingerprint, shape, tokens, whole size: see HEADER
    ids          uint32 [tokens]
    conv, ssm    float32, as in state.py
    KV           float32; for each attention layer the keys, then the values, [tokens, kv_heads, head_dim]
    checksum     XXH64 of all bytes before it

A payload that is not exactly what this engine would write for that state is refused before it is used; its lengths are
checked against the configuration before memory is taken. Restoring is exact to the bit. Both directions go through
chunks of at most CHUNK_BYTES, so that a large state is never in memory twice.
"""

import hashlib
import struct
from array import array
from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor

from services.engine.errors import PayloadError
from services.engine.model_config import ModelConfig
from services.engine.pages import PAGE_TOKENS, PagePool
from services.engine.state import State, state_bytes

CHUNK_BYTES = 1 << 20
MAGIC = b"THIMBLE\n"
VERSION = 1
HEADER = struct.Struct("<8sI32s32s9I2Q")  # magic, version, two fingerprints, nine sizes, tokens, whole size
CHECKSUM_BYTES = 8


class PayloadFormat:
    """What payloads of one engine look like. The fingerprints are the hex texts that `Info` reports."""

    def __init__(self, config: ModelConfig, model_fingerprint: str, arithmetic_fingerprint: str) -> None:
        self.config = config
        self._model = _digest(model_fingerprint)
        self._arithmetic = _digest(arithmetic_fingerprint)
        self._sizes = (
            len(config.mamba_layers),
            config.conv_channels,
            config.conv_kernel,
            config.mamba_heads,
            config.mamba_head_dim,
            config.mamba_state,
            len(config.attention_layers),
            config.kv_heads,
            config.head_dim,
        )

    def size_bytes(self, tokens: int) -> int:
        """Of the payload of a state that has consumed `tokens` ids."""
        config = self.config
        kv = 2 * 4 * len(config.attention_layers) * config.kv_heads * config.head_dim
        return HEADER.size + state_bytes(config) + tokens * (4 + kv) + CHECKSUM_BYTES

    def chunks(self, tokens: int) -> int:
        """How many chunks `dump` yields for such a state."""
        return -(-self.size_bytes(tokens) // CHUNK_BYTES)

    def dump(self, state: State) -> Iterator[bytes]:
        """The payload, in chunks that are full but for the last. `state` must not change before the last is taken."""
        assert not state.spoiled
        digest = xxhash.xxh64()
        buffer = bytearray()
        for part in self._parts(state):
            digest.update(part)
            for start in range(0, len(part), CHUNK_BYTES):
                buffer += part[start : start + CHUNK_BYTES]
                if len(buffer) >= CHUNK_BYTES:
                    yield bytes(memoryview(buffer)[:CHUNK_BYTES])
                    del buffer[:CHUNK_BYTES]
        buffer += struct.pack("<Q", digest.intdigest())
        for start in range(0, len(buffer), CHUNK_BYTES):
            yield bytes(memoryview(buffer)[start : start + CHUNK_BYTES])

    def load(self, chunks: Iterable[bytes], pool: PagePool) -> State:
        """The state of a payload. Raises PayloadError if it is not one of this engine, OutOfPagesError if no room.

        Takes no chunk beyond the payload's last one, so `chunks` may be a stream that stays open.
        """
        reader = _Reader(chunks)
        tokens = self._check_header(reader.take(HEADER.size), pool)
        state = State(self.config, pool)
        try:
            state.reserve(tokens)
            state.ids = self._check_ids(reader.take(4 * tokens))
            for tensor in (state.conv, state.ssm):
                reader.fill(_view(tensor))
            for view in _kv_views(state):
                reader.fill(view)
            reader.finish()
        except BaseException:
            state.release()
            raise
        return state

    def _parts(self, state: State) -> Iterator[bytes | memoryview]:
        size = self.size_bytes(state.tokens)
        yield HEADER.pack(MAGIC, VERSION, self._model, self._arithmetic, *self._sizes, state.tokens, size)
        yield array("I", state.ids).tobytes()
        yield _view(state.conv)
        yield _view(state.ssm)
        yield from _kv_views(state)

    def _check_header(self, header: bytes, pool: PagePool) -> int:
        magic, version, model, arithmetic, *sizes, tokens, size = HEADER.unpack(header)
        if magic != MAGIC:
            raise PayloadError(f"snapshot: starts with {magic!r}, expected {MAGIC!r}; it is not a snapshot")
        if version != VERSION:
            raise PayloadError(f"snapshot: format version {version}, this engine reads {VERSION}; discard it")
        if model != self._model:
            raise PayloadError("snapshot: of another model (its fingerprint differs); discard it")
        if arithmetic != self._arithmetic:
            raise PayloadError("snapshot: of another arithmetic (kernels or versions differ); discard it")
        if tuple(sizes) != self._sizes:
            raise PayloadError(f"snapshot: sizes {sizes}, expected {list(self._sizes)}; it is damaged")
        if tokens > pool.total * PAGE_TOKENS:
            raise PayloadError(f"snapshot: {tokens} tokens, this engine holds at most {pool.total * PAGE_TOKENS}")
        if size != self.size_bytes(tokens):
            raise PayloadError(f"snapshot: {size} bytes, expected {self.size_bytes(tokens)}; it is damaged")
        return int(tokens)

    def _check_ids(self, data: bytes) -> list[int]:
        ids = array("I")
        ids.frombytes(data)
        if ids and max(ids) >= self.config.vocab_size:
            raise PayloadError(f"snapshot: id {max(ids)} is outside the vocabulary of {self.config.vocab_size}")
        return ids.tolist()


def state_id(arithmetic_fingerprint: str, ids: Iterable[int]) -> bytes:
    """The name of the state that has consumed `ids`: equal names, equal bits. 32 bytes."""
    digest = hashlib.blake2b(arithmetic_fingerprint.encode() + b"\0", digest_size=32)
    digest.update(array("I", ids).tobytes())
    return digest.digest()


class _Reader:
    """Reads a stream of chunks as one run of bytes, hashing what it passes on. Raises PayloadError."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = memoryview(b"")
        self._digest = xxhash.xxh64()

    def take(self, size: int) -> bytes:
        data = bytearray(size)
        self.fill(memoryview(data))
        return bytes(data)

    def fill(self, target: memoryview) -> None:
        self._copy(target)
        self._digest.update(target)

    def finish(self) -> None:
        """Compare the checksum, which must end the last chunk. Asks for no chunk after that."""
        stored = bytearray(CHECKSUM_BYTES)
        self._copy(memoryview(stored))
        if struct.pack("<Q", self._digest.intdigest()) != stored:
            raise PayloadError("snapshot: the checksum does not match; it is damaged")
        if self._rest:
            raise PayloadError("snapshot: bytes follow its end; it is damaged")

    def _copy(self, target: memoryview) -> None:
        done = 0
        while done < len(target):
            if not self._rest:
                self._rest = memoryview(self._next(len(target) - done))
            count = min(len(self._rest), len(target) - done)
            target[done : done + count] = self._rest[:count]
            self._rest = self._rest[count:]
            done += count

    def _next(self, missing: int) -> bytes:
        chunk = next(self._chunks, None)
        if chunk is None:
            raise PayloadError(f"snapshot: ends {missing} bytes or more too early; it is incomplete")
        if not 0 < len(chunk) <= CHUNK_BYTES:
            raise PayloadError(f"snapshot: a chunk of {len(chunk)} bytes, expected 1 to {CHUNK_BYTES}")
        return chunk


def _kv_views(state: State) -> Iterator[memoryview]:
    for layer in range(len(state.config.attention_layers)):
        for memory in (state.pool.keys[layer], state.pool.values[layer]):
            for start in range(0, state.tokens, PAGE_TOKENS):
                page = state.pages[start // PAGE_TOKENS]
                yield _view(memory[page, : min(PAGE_TOKENS, state.tokens - start)])


def _view(tensor: Tensor) -> memoryview:
    """The tensor's own memory."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def _digest(fingerprint: str) -> bytes:
    return hashlib.blake2b(fingerprint.encode(), digest_size=32).digest()
