"""Recorded routing: which experts the router named, layer by layer and token by token, and what was guessed before.

A trace is for `thimble simulate`. It holds no text and no token ids, but what was said shapes it: treat it as private.

The file, version 1, little-endian: the eight bytes THMTRACE, then frames of
    kind u32, size u32 (of what follows the checksum), XXH64 u64 (of the same), bytes
kind 1 is JSON, once, first: `Header`. Kind 2 is rows of `row_type(top_k)`, one for each token and MoE layer, as numpy
reads them. Kind 3 is JSON, at most once, last: what the engine counted until then, to hold a simulation against. A file
that was cut short (the engine was killed, the disk was full) is good up to its last whole frame.

Owns the format and the recorder. What a replay needs of it is `Trace.routing`.
"""

import json
import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from torch import Tensor

from kernels.experts.host.replay import MOST_AHEAD, Routing
from services.engine.errors import TraceError
from services.engine.experts.store import Store

MAGIC = b"THMTRACE"
VERSION = 1
HEADER, ROWS, NOTE = 1, 2, 3
FRAME = struct.Struct("<IIQ")
PREFILL, DECODE = 0, 1
FRAME_ROWS = 4096

log = logging.getLogger(__name__)
Rows = npt.NDArray[np.void]
Phases = npt.NDArray[np.uint8]


def row_type(top_k: int) -> np.dtype[np.void]:
    """A token in a MoE layer.

    `call` counts forward calls from 0; `phase` is PREFILL or DECODE; `ahead` is 0 for what the router named, else how
    many layers before `layer` it was guessed; ids by rank, scores are the routing weights.
    """
    fields = [("call", "<u4"), ("layer", "<u2"), ("phase", "u1"), ("ahead", "u1")]
    return np.dtype([*fields, ("ids", "<u2", (top_k,)), ("scores", "<f2", (top_k,))])


def phases(tokens: Sequence[int]) -> Phases:
    """Of each row, from how many tokens each sequence has in a call."""
    return np.repeat(np.array([DECODE if count == 1 else PREFILL for count in tokens], np.uint8), tokens)


@dataclass(frozen=True)
class Header:
    """Of which model. `dense_bytes`: what the store holds beside the experts."""

    version: int
    model: str
    model_fingerprint: str
    layers: int
    experts: int
    top_k: int
    latent: int
    width: int
    block_bytes: int
    dense_bytes: int

    @staticmethod
    def of(store: Store, model: str) -> "Header":
        config = store.config
        return Header(
            version=VERSION,
            model=model,
            model_fingerprint=store.fingerprint,
            layers=len(config.moe_layers),
            experts=config.experts,
            top_k=config.experts_per_token,
            latent=config.latent_size,
            width=config.expert_width,
            block_bytes=store.layout.block_bytes,
            dense_bytes=store.dense_file.size_bytes,
        )


class Recorder:
    """Writes a trace; used by the engine's thread. A disk that fails ends the recording, never a request."""

    def __init__(self, path: Path, header: Header, most_bytes: int) -> None:
        """A file that is there is kept: the new one gets a number. Raises TraceError if none can be written."""
        self.path = _unused(path)
        self._most_bytes = most_bytes
        self._type = row_type(header.top_k)
        self._rows: list[Rows] = []
        self._waiting = 0
        self._call = -1
        self._counters: Callable[[], dict[str, Any]] = dict
        try:
            self._file = self.path.open("xb", buffering=0)
            self._file.write(MAGIC)
        except OSError as error:
            raise TraceError(f"{self.path}: a trace cannot be written: {error.strerror}; set another path") from error
        self._open = True
        self._write(HEADER, json.dumps(asdict(header)).encode())

    def attach(self, counters: Callable[[], dict[str, Any]]) -> None:
        """What to write at the end: the engine's own counts and the settings of its cache."""
        self._counters = counters

    def record(self, layer: int, ids: Tensor, weights: Tensor, phases: Phases, ahead: int = 0) -> None:
        """One layer of one forward call: ids and weights [M, k] in router rank, on the host. A call's layers follow
        each other, from 0 on, each with the guesses that were made in it behind it; not every call has guesses."""
        if not self._open:
            return
        self._call += layer == 0 and not ahead
        rows = np.empty(len(ids), self._type)
        rows["call"], rows["layer"], rows["ahead"] = self._call, layer, ahead
        rows["phase"] = phases
        rows["ids"], rows["scores"] = ids.numpy(), weights.numpy()
        self._rows.append(rows)
        self._waiting += len(rows)
        if self._waiting >= FRAME_ROWS:
            self._flush()

    def close(self) -> None:
        if not self._open:
            return
        self._flush()
        if self._open:
            self._end()

    def _flush(self) -> None:
        if self._rows:
            self._write(ROWS, np.concatenate(self._rows).tobytes())
        self._rows, self._waiting = [], 0
        if self._open and self._file.tell() > self._most_bytes:
            log.warning("trace: %s has reached %d bytes and ends there", self.path, self._most_bytes)
            self._end()

    def _end(self) -> None:
        self._write(NOTE, json.dumps(self._counters()).encode())
        if self._open:
            self._open = False
            self._file.close()

    def _write(self, kind: int, data: bytes) -> None:
        frame = memoryview(FRAME.pack(kind, len(data), xxhash.xxh64_intdigest(data)) + data)
        try:
            while frame:
                frame = frame[self._file.write(frame) :]
        except OSError as error:
            log.warning("trace: %s ends early: %s", self.path, error)
            self._open = False
            self._file.close()


@dataclass(frozen=True)
class Trace:
    """What was read of a file. `note` is empty, and `whole` false, if the recording did not end in order."""

    header: Header
    rows: Rows
    note: dict[str, Any]
    whole: bool

    @property
    def decoded_tokens(self) -> int:
        routed = self.rows[(self.rows["ahead"] == 0) & (self.rows["layer"] == 0)]
        return int((routed["phase"] == DECODE).sum())

    @property
    def prompt_tokens(self) -> int:
        routed = self.rows[(self.rows["ahead"] == 0) & (self.rows["layer"] == 0)]
        return int((routed["phase"] == PREFILL).sum())

    def routing(self) -> Routing:
        """As a replay wants it: steps of whole calls, guesses beside the rows at which they were made."""
        layers = self.header.layers
        complete = np.unique(self.rows["call"][(self.rows["layer"] == layers - 1) & (self.rows["ahead"] == 0)])
        rows = self.rows[np.isin(self.rows["call"], complete)]
        routed = rows[rows["ahead"] == 0]
        step = routed["call"].astype(np.int64) * layers + routed["layer"]
        changes = np.flatnonzero(np.diff(step)) + 1
        first = np.concatenate([[0], changes, [len(routed)]]) if len(routed) else np.zeros(1)
        guesses = []
        for ahead in range(1, MOST_AHEAD + 1):
            guessed = rows[rows["ahead"] == ahead]
            made_at = np.isin(step, guessed["call"].astype(np.int64) * layers + guessed["layer"] - ahead)
            if len(guessed) == made_at.sum() and len(guessed):
                ids = np.full(routed["ids"].shape, -1, np.int32)
                ids[made_at] = guessed["ids"]
                guesses.append(ids)
        layer = routed["layer"][first[:-1].astype(np.int64)].astype(np.int32)
        ids = routed["ids"].astype(np.int32)
        return Routing(layers, self.header.experts, layer, first.astype(np.int64), ids, tuple(guesses))


def read_trace(path: Path) -> Trace:
    """Raises TraceError if the file is no trace or not even its header is whole."""
    try:
        with path.open("rb") as file:
            data = file.read(len(MAGIC))
            if data == MAGIC:  # whatever else the path may name is not read to its end: some have none
                data += file.read()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    if not data.startswith(MAGIC):
        raise TraceError(f"{path}: not a trace of this program")
    frames, at = [], len(MAGIC)
    while at + FRAME.size <= len(data):
        kind, size, checksum = FRAME.unpack_from(data, at)
        payload = data[at + FRAME.size : at + FRAME.size + size]
        if len(payload) < size or xxhash.xxh64_intdigest(payload) != checksum:
            break
        frames.append((kind, payload))
        at += FRAME.size + size
    if not frames or frames[0][0] != HEADER:
        raise TraceError(f"{path}: its header is damaged")
    found = json.loads(frames[0][1])
    if found.get("version") != VERSION:
        raise TraceError(f"{path}: version {found.get('version')}, this program reads {VERSION}")
    header = Header(**found)
    rows = np.frombuffer(b"".join(payload for kind, payload in frames if kind == ROWS), row_type(header.top_k))
    notes = [json.loads(payload) for kind, payload in frames if kind == NOTE]
    return Trace(header, rows, notes[-1] if notes else {}, whole=bool(notes) and at == len(data))


def _unused(path: Path) -> Path:
    number, found = 1, path
    while found.exists():
        found = path.with_name(f"{path.stem}.{number}{path.suffix}")
        number += 1
    return found
