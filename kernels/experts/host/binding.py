"""The host library's one door for Python: open, step, prefetch, counters. Owns no policy and no arithmetic.

The C++ side is described where it lives: step.h (the order of work), cache.h (memory, readers, who may write what),
slots.h (states and leases), blocks.h (whole and verified), drive.h (where the bytes come from).
"""

import ctypes
import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.block import PAGE, BlockLayout
from kernels.experts.cpu.sums import sizes
from kernels.experts.host.drives import LIMIT_NS, Drive, DriveError, FileDrive
from kernels.experts.reference import MOST_INPUTS, check_scales
from kernels.workers.pool import Workers, isa_number, native

PREFETCH = ("off", "on", "auto")  # the numbers of trial.h's Prefetching
PIECE_BYTES = 400 << 10  # blocks.h's
_MESSAGE_BYTES = 2000


class HostError(RuntimeError):
    """The library cannot be opened as asked: no memory, no file, no threads. The message says which."""


class BlockError(RuntimeError):
    """A block that a step needs cannot be had. The message names the layer, the expert and the reason."""


@dataclass(frozen=True)
class Copy:
    """A second file that holds blocks too: `offsets` [layers, experts], -1 for a block that is not in it."""

    path: Path
    offsets: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Catalog:
    """Every block of a model: `layout`, and per layer and expert [layers, experts] its place, checksum and scales.

    All blocks are in the file at `path`; those that `copies` hold as well are read from whichever is less busy.
    """

    path: Path
    layout: BlockLayout
    offsets: npt.NDArray[np.int64]
    checksums: npt.NDArray[np.uint64]
    up_scales: npt.NDArray[np.float32]
    down_scales: npt.NDArray[np.float32]
    copies: tuple[Copy, ...] = ()

    def __post_init__(self) -> None:
        shape = self.offsets.shape
        for name in ("offsets", "checksums", "up_scales", "down_scales"):
            array = getattr(self, name)
            if array.ndim != 2 or array.shape != shape or not array.flags.c_contiguous:
                raise ValueError(f"{name}: expected a contiguous array {shape}, found {array.shape}")
        for copy in self.copies:
            if copy.offsets.shape != shape or copy.offsets.dtype != np.int64 or not copy.offsets.flags.c_contiguous:
                raise ValueError(f"{copy.path}: expected contiguous offsets {shape}, found {copy.offsets.shape}")
        there = [self.offsets, *(copy.offsets[copy.offsets != -1] for copy in self.copies)]
        if any((offsets % PAGE).any() or (offsets < 0).any() for offsets in there):
            raise ValueError(f"offsets must be multiples of {PAGE}")
        if max(self.layout.latent, self.layout.width) > MOST_INPUTS:
            raise ValueError(f"an expert may have at most {MOST_INPUTS} inputs and neurons")
        for up, down in zip(self.up_scales.flat, self.down_scales.flat, strict=True):
            check_scales(float(up), float(down))


class _View(ctypes.Structure):
    """catalog_abi.h's CatalogView."""

    _fields_ = (
        ("sizes", ctypes.c_void_p),
        ("layers", ctypes.c_int64),
        ("experts", ctypes.c_int64),
        ("drive_count", ctypes.c_int64),
        ("drives", ctypes.c_void_p),
        ("offsets", ctypes.c_void_p),
        ("checksums", ctypes.c_void_p),
        ("up_scales", ctypes.c_void_p),
        ("down_scales", ctypes.c_void_p),
    )

    def __init__(self, catalog: Catalog, drives: Sequence[Drive]) -> None:
        offsets = [catalog.offsets, *(copy.offsets for copy in catalog.copies)]
        assert len(drives) == len(offsets)
        pointers = ctypes.c_void_p * len(drives)
        self.kept = (  # as long as this structure
            sizes(catalog.layout),
            pointers(*(drive.handle for drive in drives)),
            pointers(*(array.ctypes.data for array in offsets)),
            catalog,
        )
        super().__init__(
            self.kept[0].ctypes.data,
            *catalog.offsets.shape,
            len(drives),
            ctypes.addressof(self.kept[1]),
            ctypes.addressof(self.kept[2]),
            *(array.ctypes.data for array in (catalog.checksums, catalog.up_scales, catalog.down_scales)),
        )


@functools.cache
def _library() -> ctypes.CDLL:
    lib = native()
    number, pointer, text = ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p
    message = (text, ctypes.c_int64)
    arrays = (pointer, pointer, pointer, pointer)
    lib.thimble_host_open.restype = pointer
    lib.thimble_host_open.argtypes = (
        *(pointer, number, ctypes.POINTER(_View), text, number, number, number, number, number, number, ctypes.c_int64),
        *message,
    )
    lib.thimble_drives_rate.restype = ctypes.c_double
    lib.thimble_drives_rate.argtypes = (ctypes.POINTER(_View), number, ctypes.c_int64, ctypes.c_uint32)
    lib.thimble_host_close.argtypes = (pointer,)
    lib.thimble_host_step.argtypes = (pointer, number, number, number, *arrays, *message)
    lib.thimble_host_prefetch.argtypes = (pointer, number, pointer, number)
    lib.thimble_host_resident.argtypes = (pointer, pointer)
    lib.thimble_host_warm.argtypes = (pointer, pointer, number)
    lib.thimble_host_heat.argtypes = lib.thimble_host_set_heat.argtypes = (pointer, pointer)
    lib.thimble_host_shrink.argtypes = (pointer, number)
    lib.thimble_host_prefetching.argtypes = (pointer,)
    lib.thimble_host_counter_names.restype = text
    lib.thimble_host_counters.argtypes = (pointer, pointer)
    lib.thimble_host_check.argtypes = (pointer, *message)
    lib.thimble_host_notice.argtypes = (pointer, *message)
    lib.thimble_host_memory.restype = ctypes.c_uint64
    lib.thimble_host_memory.argtypes = (pointer, ctypes.POINTER(ctypes.c_int64))
    lib.thimble_xxh64.restype = ctypes.c_uint64
    lib.thimble_xxh64.argtypes = (pointer, ctypes.c_uint64)
    return lib


def xxh64(data: npt.NDArray[np.uint8]) -> int:
    """The checksum that blocks are verified with, as C++ computes it."""
    return int(_library().thimble_xxh64(data.ctypes.data, data.size))


def open_drives(catalog: Catalog) -> list[Drive]:
    """Of the catalog's files. Raises HostError if one cannot be opened."""
    try:
        return [FileDrive(path) for path in (catalog.path, *(copy.path for copy in catalog.copies))]
    except DriveError as error:
        raise HostError(str(error)) from error


def read_rate(catalog: Catalog, drives: Sequence[Drive], depth: int, limit_ns: int = LIMIT_NS, seed: int = 0) -> float:
    """GB/s of random blocks read and verified with `depth` reads in flight for `limit_ns`; at least one read each."""
    return float(_library().thimble_drives_rate(_View(catalog, drives), depth, limit_ns, seed)) / 1e9


class Host:
    """Slots, readers and the steps that use them. `step` by one thread at a time; `prefetch` and the rest beside it.

    `drives` are the catalog's file and its copies, in that order, or what stands for them in a benchmark; other hosts
    may share them. Blocks are read in pieces of about `piece_bytes`, whole pages. `poison` overwrites evicted blocks
    and `read_delay_us` slows every read: both are for tests.
    """

    def __init__(
        self,
        catalog: Catalog,
        workers: Workers,
        *,
        slots: int,
        readers: int,
        isa: str | None = None,
        policy: str = "shipped",
        prefetch: str = "on",
        lock_memory: bool = False,
        poison: bool = False,
        read_delay_us: int = 0,
        piece_bytes: int = PIECE_BYTES,
        drives: Sequence[Drive] | None = None,
    ) -> None:
        if slots < 1 or readers < 1:
            raise HostError(f"{slots} slots and {readers} readers: at least one of each")
        self.catalog = catalog
        self.workers = workers  # also keeps the pool alive
        self._message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        layers, experts = catalog.offsets.shape
        self._drives = open_drives(catalog) if drives is None else list(drives)  # kept alive for the readers
        self._handle = _library().thimble_host_open(
            workers.handle,
            isa_number(isa),
            _View(catalog, self._drives),
            policy.encode(),
            PREFETCH.index(prefetch),
            min(slots, layers * experts),
            readers,
            lock_memory,
            poison,
            read_delay_us,
            max(PAGE, piece_bytes),
            *self._text(),
        )
        if not self._handle:
            raise HostError(self._message.value.decode())
        self._closing = weakref.finalize(self, _library().thimble_host_close, self._handle)

    def step(self, layer: int, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        """ids int32 [M, k], weights float32 [M, k], x float32 [M, latent] -> float32 [M, latent], as reference.step.

        Raises BlockError if a block cannot be had, ValueError on shapes, dtypes or ids that do not fit the model.
        """
        rows, top_k = ids.shape
        latent = self.catalog.layout.latent
        if weights.shape != ids.shape or x.shape != (rows, latent):
            raise ValueError(f"step: ids {tuple(ids.shape)}, weights {tuple(weights.shape)}, x {tuple(x.shape)}")
        if ids.dtype != torch.int32 or weights.dtype != torch.float32 or x.dtype != torch.float32:
            raise ValueError(f"step: ids {ids.dtype}, weights {weights.dtype}, x {x.dtype}")
        ids, weights, x = ids.contiguous(), weights.contiguous(), x.contiguous()
        out = torch.empty(rows, latent)
        pointers = ids.data_ptr(), weights.data_ptr(), x.data_ptr(), out.data_ptr()
        status = _library().thimble_host_step(self._open(), layer, rows, top_k, *pointers, *self._text())
        if status == 2:
            raise ValueError(f"step: MoE layer {layer} or one of its ids is not of this model {self.shape}")
        if status:
            raise BlockError(self._message.value.decode())
        return out

    def prefetch(self, layer: int, ids: npt.ArrayLike) -> None:
        """These experts may be needed soon. Ids that are not of this model are left out."""
        array = np.ascontiguousarray(ids, np.int32)
        _library().thimble_host_prefetch(self._open(), layer, array.ctypes.data, array.size)

    def resident(self) -> npt.NDArray[np.int32]:
        """The blocks in RAM as layer * experts + expert, the longest unused first."""
        keys = np.empty(self.catalog.offsets.size, np.int32)
        return keys[: _library().thimble_host_resident(self._open(), keys.ctypes.data)].copy()

    def warm(self, keys: npt.ArrayLike) -> None:
        """Read these blocks into free slots while nothing else is to be read: what `resident` said before a restart.

        Raises ValueError on a key that is not of this model.
        """
        array = np.ascontiguousarray(keys, np.int32)
        if array.ndim != 1 or ((array < 0) | (array >= self.catalog.offsets.size)).any():
            raise ValueError(f"warm: a key is not of this model {self.shape}")
        _library().thimble_host_warm(self._open(), array.ctypes.data, array.size)

    def heat(self) -> npt.NDArray[np.uint32]:
        """How often decode has named each block of late, [layers * experts]: a count that halves now and then."""
        counts = np.empty(self.catalog.offsets.size, np.uint32)
        _library().thimble_host_heat(self._open(), counts.ctypes.data)
        return counts

    def set_heat(self, counts: npt.NDArray[np.uint32]) -> None:
        """What `heat` said before a restart; from the thread that steps. Raises ValueError for another model's."""
        array = np.ascontiguousarray(counts, np.uint32)
        if array.shape != (self.catalog.offsets.size,):
            raise ValueError(f"heat: {array.shape} counts for a model of {self.catalog.offsets.size} blocks")
        _library().thimble_host_set_heat(self._open(), array.ctypes.data)

    def shrink(self, slots: int) -> None:
        """Give the last slots up, for memory that cannot be page-locked; before the first step or hint."""
        if not 0 < slots <= self.counters()["slots_total"]:
            raise ValueError(f"shrink: {slots} of {self.counters()['slots_total']} slots")
        _library().thimble_host_shrink(self._open(), slots)

    @property
    def prefetching(self) -> bool:
        """Whether hints are taken now."""
        return bool(_library().thimble_host_prefetching(self._open()))

    @property
    def address(self) -> int:
        """Of the open host in the library, for other parts of it."""
        return self._open()

    def memory(self) -> tuple[int, int]:
        """Address and bytes of the slots: what is page-locked for a GPU."""
        size_bytes = ctypes.c_int64()
        return int(_library().thimble_host_memory(self._open(), ctypes.byref(size_bytes))), size_bytes.value

    @property
    def shape(self) -> Any:
        """(layers, experts)."""
        return self.catalog.offsets.shape

    def counters(self) -> dict[str, int]:
        names = _library().thimble_host_counter_names().decode().split()
        values = np.zeros(len(names), np.int64)
        _library().thimble_host_counters(self._open(), values.ctypes.data)
        return dict(zip(names, values.tolist(), strict=True))

    def check(self) -> None:
        """Raises AssertionError, with the numbers, if free + loading + ready slots are not all slots."""
        text = ctypes.create_string_buffer(_MESSAGE_BYTES)
        assert _library().thimble_host_check(self._open(), text, _MESSAGE_BYTES), text.value.decode()

    def notices(self) -> list[str]:
        """What the operator should know and has not been told: each sentence once."""
        found: list[str] = []
        text = ctypes.create_string_buffer(_MESSAGE_BYTES)
        while True:
            _library().thimble_host_notice(self._open(), text, _MESSAGE_BYTES)
            if not text.value:
                return found
            found.append(text.value.decode())

    def close(self) -> None:
        """Waits for reads under way, then frees the slots. No step may be under way."""
        self._closing()
        self._handle = None

    def _open(self) -> int:
        assert self._handle, "the host is closed"
        return int(self._handle)

    def _text(self) -> tuple[Any, int]:
        return self._message, _MESSAGE_BYTES
