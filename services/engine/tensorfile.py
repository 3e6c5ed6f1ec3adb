"""The safetensors format, a tensor at a time: read with bounded memory, write without holding the whole file.

Owns headers, sizes and truncation. Knows nothing of names or models. A file is 8 bytes of header length, a JSON header
{name: {dtype, shape, data_offsets}}, then the data without holes; offsets count from the end of the header.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from services.engine.errors import CheckpointError, DiskError
from services.engine.parsing import parse_json

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOST_HEADER_BYTES = 100_000_000
_MOST_DIMENSIONS = 8  # a product of a million of them takes minutes
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies. `offset` counts from the start of the file."""

    path: Path
    name: str  # as written in the file
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size_bytes: int

    def read(self) -> Tensor:
        """The tensor, in memory of its own. Raises CheckpointError if the file ends before it."""
        data = bytearray(self.size_bytes)
        self.read_into(memoryview(data))
        if not self.size_bytes:
            return torch.empty(self.shape, dtype=DTYPES[self.dtype])
        return torch.frombuffer(data, dtype=DTYPES[self.dtype]).reshape(self.shape)

    def read_into(self, data: memoryview) -> None:
        """The tensor's bytes into `data`, which is as large. Raises CheckpointError if the file ends before it."""
        assert data.nbytes == self.size_bytes
        left = data.cast("B")
        with self.path.open("rb", buffering=0) as file:
            file.seek(self.offset)
            while left:
                size = file.readinto(left)  # one read gives at most 2 GiB
                if not size:
                    raise CheckpointError(f"{self.path}: ends inside tensor {self.name}; fetch the file again")
                left = left[size:]

    def chunks(self) -> Iterator[bytes]:
        """The tensor's bytes in pieces of at most 16 MiB."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            left = self.size_bytes
            while left:
                piece = file.read(min(left, _CHUNK_BYTES))
                if not piece:
                    raise CheckpointError(f"{self.path}: ends inside tensor {self.name}; fetch the file again")
                left -= len(piece)
                yield piece


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of a file by its name there. Raises CheckpointError if the file is missing, damaged or truncated."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MOST_HEADER_BYTES):
                raise CheckpointError(f"{path}: not a safetensors file, or truncated ({size} bytes); fetch it again")
            header = parse_json(file.read(length), lambda pairs: _no_name_twice(path, pairs))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: not found; the checkpoint is incomplete, fetch it again") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: its safetensors header is not JSON; fetch the file again") from error
    entries = {}
    for name, fields in header.items() if isinstance(header, dict) else ():
        if name != "__metadata__":
            entries[name] = _entry(path, name, fields, data_start=8 + length)
    ends = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: entry.offset):
        if entry.offset < ends:
            raise CheckpointError(f"{path}: tensor {entry.name} overlaps the one before it; fetch the file again")
        ends = entry.offset + entry.size_bytes
    needed = max((entry.offset + entry.size_bytes for entry in entries.values()), default=8 + length)
    if needed > size:
        raise CheckpointError(f"{path}: truncated, {size} of {needed} bytes; fetch the file again")
    return entries


def _no_name_twice(path: Path, pairs: list[tuple[str, object]]) -> dict[str, object]:
    """JSON itself would silently keep the last of two."""
    names = dict(pairs)
    if len(names) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise CheckpointError(f"tensor {twice}: present twice in {path}; fetch the file again")
    return names


def _entry(path: Path, name: str, fields: object, data_start: int) -> Entry:
    try:
        if not isinstance(fields, dict):
            raise TypeError
        dtype, shape, (begin, end) = str(fields["dtype"]), tuple(fields["shape"]), fields["data_offsets"]
        if len(shape) > _MOST_DIMENSIONS or any(type(number) is not int for number in (*shape, begin, end)):
            raise TypeError
        size = math.prod(shape) * DTYPES[dtype].itemsize if dtype in DTYPES else end - begin
        if min(shape, default=0) < 0 or begin < 0 or end - begin != size:
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path}: the header's entry for tensor {name} is damaged; fetch the file again"
        ) from error
    return Entry(path, name, dtype, shape, data_start + begin, size)


def header_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, list[str]]:
    """The start of a file that will hold `tensors` (name -> dtype, shape), and the order in which their data follow.

    Larger element types come first, so that every tensor is aligned to its own element.
    """
    order = sorted(tensors, key=lambda name: (-DTYPES[tensors[name][0]].itemsize, name))
    header, offset = {}, 0
    for name in order:
        dtype, shape = tensors[name]
        end = offset + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def write_file(path: Path, pieces: Iterable[bytes]) -> tuple[int, str]:
    """Write `pieces` to `path`, flushed to the disk; its size in bytes and XXH64 (hex). Raises DiskError."""
    digest, size = xxhash.xxh64(), 0
    try:
        with path.open("wb") as file:
            for piece in pieces:
                file.write(piece)
                digest.update(piece)
                size += len(piece)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise DiskError(
            f"{path}: cannot be written: {error.strerror}; free space there or choose another folder"
        ) from error
    return size, digest.hexdigest()


def tensor_bytes(tensor: Tensor) -> bytes:
    """A tensor's elements in order, as a safetensors file holds them."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, str]:
    """Write tensors that are in memory; as `write_file`."""
    start, order = header_bytes({name: (_NAMES[t.dtype], tuple(t.shape)) for name, t in tensors.items()})
    return write_file(path, (start, *(tensor_bytes(tensors[name]) for name in order)))
