"""Stored states as files, for when the store has lost them. Owns the folder: its form, that nobody else can read it,
that it stays within its size, its age and what may be written in a day, and that nothing is read from it which is not
what was written. Its calls wait for the disk; one thread at a time. Which states, and when, is spilling.py's.

states/KEY holds a record and its payload's own part, blocks/NAME a KV block that several states share; each file ends
with a checksum of all before. A file is written under another name first, so a half-written one is never found.
"""

import contextlib
import hashlib
import json
import os
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    used_s: float  # when, by the clock


class Disk:
    """`limit_bytes` of files at most, `daily_bytes` written at most in a day (UTC), also across restarts. What was not
    used for `ttl_s` is removed at the start and with the next reading or writing."""

    def __init__(self, folder: Path, limit_bytes: int, daily_bytes: int, ttl_s: float) -> None:
        """Raises OSError, also for a folder that others can look into."""
        self.limit_bytes, self.daily_bytes, self._ttl_s = limit_bytes, daily_bytes, ttl_s
        self._states_dir, self._blocks_dir, self._day_file = folder / "states", folder / "blocks", folder / "written"
        for each in (folder, self._states_dir, self._blocks_dir):
            _make_private(each)
        self._states: dict[bytes, _State] = {}  # the longest unused first
        self._blocks: dict[str, int] = {}  # size of each
        self._day, self._day_bytes = self._read_day()
        self.written_bytes = 0  # since the start
        self._look()
        self._remove_old(keep=frozenset())

    @property
    def used_bytes(self) -> int:
        """May be asked while another thread writes, as `in` may."""
        return sum(state.size_bytes for state in list(self._states.values())) + sum(list(self._blocks.values()))

    def __contains__(self, key: bytes) -> bool:
        return key in self._states

    def write(self, key: bytes, record: Record, read: Callable[[list[int]], Iterator[bytes]]) -> None:
        """`read` is given the numbers of the blocks that are not there, and gives the chunks of the own part and then
        these blocks; it is not called for what has no room or no budget. Raises DiskRefused or OSError: then the state
        is not there, older ones may have made room for it, and blocks that were written go with the next writing."""
        head, heads = record.head, _heads(record)
        names = [name.hex() for name in record.blocks]
        keep = frozenset(names)
        self._remove_old(keep)
        lacking = [number for number, name in enumerate(names) if name not in self._blocks]
        coming_bytes = len(MAGIC) + len(heads) + head.size_bytes + CHECKSUM_BYTES
        coming_bytes += len(lacking) * (head.block_bytes + CHECKSUM_BYTES)
        if coming_bytes + sum(self._blocks.get(name, 0) for name in keep) > self.limit_bytes:
            raise DiskRefused(f"{coming_bytes} bytes beside its other blocks, more than the disk may hold")
        today = int(time.time() // DAY_S)
        if today > self._day:  # a clock that is set back brings no new budget
            self._day, self._day_bytes = today, 0
        if self._day_bytes + coming_bytes > self.daily_bytes:
            raise DiskRefused(f"{coming_bytes} bytes more than may be written today")
        self._make_room(coming_bytes, keep)
        before = self.written_bytes
        self._day_bytes += coming_bytes  # before: a process that is killed has written it too
        try:
            self._note_day()
            pieces = read(lacking)

            def content() -> Iterator[bytes]:
                yield from (MAGIC, heads)
                yield from _exactly(pieces, head.chunks, head.size_bytes)
                for number in lacking:  # before the state gets its name: what is found has its blocks
                    block = _exactly(pieces, 1, head.block_bytes)
                    self._blocks[names[number]] = self._put(self._blocks_dir / names[number], block)

            size_bytes = self._put(self._states_dir / key.hex(), content())
        finally:
            unwritten_bytes = coming_bytes - (self.written_bytes - before)
            if unwritten_bytes:
                self._day_bytes -= unwritten_bytes
                with contextlib.suppress(OSError):
                    self._note_day()
        self._states.pop(key, None)
        self._states[key] = _State(size_bytes, keep, time.time())

    def read(self, key: bytes) -> tuple[Record, memoryview]:
        """Record and own part. Raises DiskRefused, and then it is gone."""
        self._remove_old(keep=frozenset())
        path = self._states_dir / key.hex()
        try:
            if key not in self._states:
                raise DiskRefused("it is there no more")
            data = _get(path)
            record, at = _record_of(data)
            os.utime(path)
        except (OSError, DiskRefused) as error:
            self.forget([key])
            raise DiskRefused(f"a state on the disk cannot be used: {error}") from error
        state = self._states.pop(key)
        self._states[key] = _State(state.size_bytes, state.blocks, time.time())
        return record, data[at:]

    def read_block(self, key: bytes, record: Record, number: int) -> bytes:
        """A block of this state. Raises DiskRefused, and then the state is gone."""
        name = record.blocks[number].hex()
        try:
            return bytes(_get(self._blocks_dir / name))
        except (OSError, DiskRefused) as error:
            self._remove_block(name)
            self.forget([key])
            raise DiskRefused(f"a block on the disk cannot be used: {error}") from error

    def forget(self, keys: Iterable[bytes]) -> None:
        """Their blocks go with the next reading or writing, unless another state has them."""
        for key in keys:
            if self._states.pop(key, None) is not None:
                with contextlib.suppress(OSError):
                    (self._states_dir / key.hex()).unlink(missing_ok=True)

    def _put(self, path: Path, pieces: Iterable[bytes]) -> int:
        """Bytes on the disk."""
        digest, size_bytes, half = hashlib.blake2b(digest_size=CHECKSUM_BYTES), 0, path.with_suffix(".half")
        try:
            with open(half, "wb", opener=_private) as file:
                for piece in pieces:
                    digest.update(piece)
                    file.write(piece)
                    size_bytes += len(piece)
                    self.written_bytes += len(piece)
                file.write(digest.digest())
                self.written_bytes += CHECKSUM_BYTES
            half.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                half.unlink(missing_ok=True)
            raise
        return size_bytes + CHECKSUM_BYTES

    def _make_room(self, size_bytes: int, keep: frozenset[str]) -> None:
        """With all states gone there is room: the caller has seen to that."""
        while self._states and self.used_bytes + size_bytes > self.limit_bytes:
            self.forget([next(iter(self._states))])
            self._remove_unused(keep)

    def _remove_old(self, keep: frozenset[str]) -> None:
        """States that were not used for too long, and blocks that no state has."""
        oldest_s = time.time() - self._ttl_s
        self.forget([key for key, state in self._states.items() if state.used_s < oldest_s])
        self._remove_unused(keep)

    def _remove_unused(self, keep: frozenset[str]) -> None:
        wanted = keep.union(*(state.blocks for state in self._states.values()))
        for name in [name for name in self._blocks if name not in wanted]:
            self._remove_block(name)

    def _remove_block(self, name: str) -> None:
        self._blocks.pop(name, None)
        with contextlib.suppress(OSError):
            (self._blocks_dir / name).unlink(missing_ok=True)

    def _look(self) -> None:
        """What is there. Files that are not ours, or not whole, are removed when they are found in our folders."""
        found: list[tuple[bytes, _State]] = []
        for path in self._blocks_dir.iterdir():
            try:
                self._blocks[bytes.fromhex(path.name).hex()] = path.stat().st_size
            except (OSError, ValueError):
                _remove(path)
        for path in self._states_dir.iterdir():
            try:
                with path.open("rb") as file:
                    about = os.fstat(file.fileno())
                    start = file.read(len(MAGIC) + _SIZES.size)
                    heads_bytes = min(about.st_size, sum(_SIZES.unpack(start[len(MAGIC) :])))
                    record, _ = _record_of(memoryview(start + file.read(heads_bytes)))
                blocks = frozenset(name.hex() for name in record.blocks)
                if not blocks <= self._blocks.keys():
                    raise DiskRefused("blocks of it are gone")
                found.append((bytes.fromhex(path.name), _State(about.st_size, blocks, about.st_mtime)))
            except (OSError, ValueError, struct.error, DiskRefused):
                _remove(path)
        self._states.update(sorted(found, key=lambda each: each[1].used_s))

    def _read_day(self) -> tuple[int, int]:
        """A day that is yet to come counts as today: else a clock that was wrong once would end the writing."""
        try:
            day, written = json.loads(self._day_file.read_text())
            return min(int(day), int(time.time() // DAY_S)), max(0, int(written))
        except (OSError, ValueError, TypeError):
            return 0, 0

    def _note_day(self) -> None:
        half = self._day_file.with_suffix(".half")
        with open(half, "w", opener=_private) as file:
            json.dump([self._day, self._day_bytes], file)
        half.replace(self._day_file)


def _heads(record: Record) -> bytes:
    fields: Sequence[bytes] = list(to_fields(record).values())
    return _SIZES.pack(*map(len, fields)) + b"".join(fields)


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


def _exactly(pieces: Iterator[bytes], count: int, size_bytes: int) -> Iterator[bytes]:
    """So many of them. Raises DiskRefused if they are not there, or not of this size together."""
    for _ in range(count):
        piece = next(pieces, b"")
        size_bytes -= len(piece)
        yield piece
    if size_bytes:
        raise DiskRefused("the store has it no more")


def _get(path: Path) -> memoryview:
    """Without its checksum. Raises OSError or DiskRefused."""
    data = memoryview(path.read_bytes())
    if hashlib.blake2b(data[:-CHECKSUM_BYTES], digest_size=CHECKSUM_BYTES).digest() != data[-CHECKSUM_BYTES:]:
        raise DiskRefused("its checksum does not match")
    return data[:-CHECKSUM_BYTES]


def _make_private(folder: Path) -> None:
    """What people wrote lies there: of our user's, and closed to all others. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = folder.stat()
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise PermissionError(f"{folder} can be read by others: make it this user's own (chown), and chmod 700")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
