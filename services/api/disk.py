"""Stored states as files, for when the store has lost them. Owns the folder: its form, that it stays within its size
and within what may be written in a day, and that nothing is read from it which is not what was written. Its calls wait
for the disk; one thread at a time. Which states, and when, is spilling.py's.

states/KEY holds a record and its payload's own part, blocks/NAME a KV block that several states share; each file ends
with a checksum of all before. A file is written under another name first, so a half-written one is never found.
"""

import contextlib
import hashlib
import json
import os
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.api.records import Record, head_from_field, record_from_fields, to_fields

MAGIC = b"THIMBLE DISK 1\n"
CHECKSUM_BYTES = 32
_SIZES = struct.Struct("<3I")  # of the record's three fields
DAY_S = 86400


class DiskRefused(Exception):
    """It is not written, or what is there cannot be used. The message says why."""


@dataclass(frozen=True)
class _State:
    size_bytes: int
    blocks: frozenset[str]


class Disk:
    """`limit_bytes` of files at most, `daily_bytes` written at most in a day (UTC), also across restarts."""

    def __init__(self, folder: Path, limit_bytes: int, daily_bytes: int) -> None:
        """Raises OSError."""
        self._limit_bytes, self._daily_bytes = limit_bytes, daily_bytes
        self._states_dir, self._blocks_dir, self._day_file = folder / "states", folder / "blocks", folder / "written"
        for each in (self._states_dir, self._blocks_dir):
            each.mkdir(parents=True, exist_ok=True)
        self._states: dict[bytes, _State] = {}  # the longest unused first
        self._blocks: dict[str, int] = {}  # size of each
        self._day, self._day_bytes = self._read_day()
        self.written_bytes = 0  # since the start
        self._look()

    @property
    def used_bytes(self) -> int:
        return sum(state.size_bytes for state in self._states.values()) + sum(self._blocks.values())

    def __contains__(self, key: bytes) -> bool:
        return key in self._states

    def lacks(self, record: Record) -> list[int]:
        """Numbers of the blocks that are not there."""
        return [number for number, name in enumerate(record.blocks) if name.hex() not in self._blocks]

    def write(
        self, key: bytes, record: Record, own_part: Sequence[bytes], blocks: Sequence[tuple[bytes, bytes]]
    ) -> None:
        """`own_part` in chunks; `blocks`: name and content of those that were lacking. Raises DiskRefused or OSError;
        then all is as before, but for blocks, which go when room is made."""
        fields = to_fields(record)
        heads = _SIZES.pack(*map(len, fields.values())) + b"".join(fields.values())
        coming_bytes = len(MAGIC) + len(heads) + sum(map(len, own_part)) + CHECKSUM_BYTES
        coming_bytes += sum(len(data) + CHECKSUM_BYTES for _, data in blocks)
        today = int(time.time() // DAY_S)
        if today != self._day:
            self._day, self._day_bytes = today, 0
        if self._day_bytes + coming_bytes > self._daily_bytes:
            raise DiskRefused(f"{coming_bytes} bytes more than may be written today")
        self._make_room(coming_bytes, keep={name.hex() for name in record.blocks})
        self._day_bytes += coming_bytes  # before: what fails halfway was written too
        self.written_bytes += coming_bytes
        self._day_file.write_text(json.dumps([self._day, self._day_bytes]))
        for name, data in blocks:
            self._blocks[name.hex()] = _put(self._blocks_dir / name.hex(), [data])
        size_bytes = _put(self._states_dir / key.hex(), [MAGIC, heads, *own_part])
        self._states.pop(key, None)
        self._states[key] = _State(size_bytes, frozenset(name.hex() for name in record.blocks))

    def read(self, key: bytes) -> tuple[Record, memoryview, Iterator[bytes]]:
        """Record, own part, and the blocks as they are asked for. Raises DiskRefused, and then it is gone."""
        path = self._states_dir / key.hex()
        try:
            data = _get(path)
            record, at = _record_of(data)
            os.utime(path)
        except (OSError, DiskRefused) as error:
            self.forget(key)
            raise DiskRefused(f"a state on the disk cannot be used: {error}") from error
        self._states[key] = self._states.pop(key)
        return record, data[at:], self._read_blocks(key, record)

    def forget(self, key: bytes) -> None:
        if self._states.pop(key, None) is not None:
            with contextlib.suppress(OSError):
                (self._states_dir / key.hex()).unlink(missing_ok=True)

    def _read_blocks(self, key: bytes, record: Record) -> Iterator[bytes]:
        for name in record.blocks:
            path = self._blocks_dir / name.hex()
            try:
                yield bytes(_get(path))
            except (OSError, DiskRefused) as error:
                self._blocks.pop(name.hex(), None)
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
                self.forget(key)
                raise DiskRefused(f"a block on the disk cannot be used: {error}") from error

    def _make_room(self, size_bytes: int, keep: set[str]) -> None:
        if size_bytes > self._limit_bytes:
            raise DiskRefused(f"{size_bytes} bytes, more than the disk may hold")
        while self.used_bytes + size_bytes > self._limit_bytes:
            wanted = keep.union(*(state.blocks for state in self._states.values()))
            unused = [name for name in self._blocks if name not in wanted]
            for name in unused:
                with contextlib.suppress(OSError):
                    (self._blocks_dir / name).unlink(missing_ok=True)
                del self._blocks[name]
            if not unused and not self._states:
                raise DiskRefused(f"{size_bytes} bytes, more than the disk may hold beside their blocks")
            if not unused:
                self.forget(next(iter(self._states)))

    def _look(self) -> None:
        """What is there. Files that are not ours, or not whole, are removed when they are found in our folders."""
        found: list[tuple[float, bytes, _State]] = []
        for path in self._blocks_dir.iterdir():
            self._blocks[path.name] = path.stat().st_size
        for path in self._states_dir.iterdir():
            try:
                with path.open("rb") as file:
                    start = file.read(len(MAGIC) + _SIZES.size)
                    record, _ = _record_of(memoryview(start + file.read(sum(_SIZES.unpack(start[len(MAGIC) :])))))
                stat, key = path.stat(), bytes.fromhex(path.name)
                blocks = frozenset(name.hex() for name in record.blocks)
                found.append((stat.st_mtime, key, _State(stat.st_size, blocks)))
            except (OSError, ValueError, struct.error, DiskRefused):
                with contextlib.suppress(OSError):
                    path.unlink()
        for _, key, state in sorted(found, key=lambda each: each[0]):
            if state.blocks <= self._blocks.keys():
                self._states[key] = state
            else:
                (self._states_dir / key.hex()).unlink(missing_ok=True)

    def _read_day(self) -> tuple[int, int]:
        try:
            day, written = json.loads(self._day_file.read_text())
            return int(day), max(0, int(written))
        except (OSError, ValueError, TypeError):
            return 0, 0


def _record_of(data: memoryview) -> tuple[Record, int]:
    """The record at the beginning of a state's file, and where the own part begins."""
    sizes_at = len(MAGIC)
    if data[:sizes_at] != MAGIC or len(data) < sizes_at + _SIZES.size:
        raise DiskRefused("it is no state of this version")
    at, fields = sizes_at + _SIZES.size, []
    for size in _SIZES.unpack_from(data, sizes_at):
        fields.append(bytes(data[at : at + size]))
        at += size
    head = head_from_field(fields[0])
    record = None if head is None else record_from_fields(head, fields[1], fields[2])
    if record is None:
        raise DiskRefused("its record is damaged")
    return record, at


def _put(path: Path, pieces: Sequence[bytes]) -> int:
    """Bytes on the disk."""
    digest, size_bytes, half = hashlib.blake2b(digest_size=CHECKSUM_BYTES), CHECKSUM_BYTES, path.with_suffix(".half")
    try:
        with half.open("wb") as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
                size_bytes += len(piece)
            file.write(digest.digest())
        half.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            half.unlink(missing_ok=True)
        raise
    return size_bytes


def _get(path: Path) -> memoryview:
    """Without its checksum. Raises OSError or DiskRefused."""
    data = memoryview(path.read_bytes())
    if hashlib.blake2b(data[:-CHECKSUM_BYTES], digest_size=CHECKSUM_BYTES).digest() != data[-CHECKSUM_BYTES:]:
        raise DiskRefused("its checksum does not match")
    return data[:-CHECKSUM_BYTES]
