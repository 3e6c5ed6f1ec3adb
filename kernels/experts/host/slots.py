"""The host library's slot table and policy alone, without memory or disk: what a simulator replays traces through."""

import ctypes
import weakref
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from kernels.workers.pool import native


class State(IntEnum):
    FREE = 0
    LOADING = 1
    READY = 2


class Why(IntEnum):
    DEMAND = 0
    PREFETCH = 1
    SWEEP = 2
    WARM = 3
    EXPECTED = 4


@dataclass(frozen=True)
class Lease:
    slot: int
    generation: int


@dataclass(frozen=True)
class Slot:
    state: State
    key: int  # -1: none
    generation: int
    leases: int


@dataclass(frozen=True)
class SlotCounts:
    evictions: int
    prefetch_issued: int
    prefetch_useful: int
    prefetch_wasted: int


class SlotTable:
    """slots.h's table of `slots` slots for keys 0 <= key < keys, those of `layers` layers one after the other.

    Raises ValueError if there is no such policy.
    """

    def __init__(
        self, slots: int, keys: int, policy: str = "lru", library: ctypes.CDLL | None = None, layers: int = 1
    ) -> None:
        self._lib = library or native()
        self._lib.thimble_slots_open.restype = ctypes.c_void_p
        handle = self._lib.thimble_slots_open(slots, layers, keys // layers, policy.encode())
        if not handle:
            raise ValueError(f"there is no cache policy {policy!r}")
        self.slots = slots
        self._handle = ctypes.c_void_p(handle)
        weakref.finalize(self, self._lib.thimble_slots_close, self._handle)

    def lease(self, key: int, why: Why = Why.DEMAND) -> Lease | None:
        """A lease of a block that is here or on its way; None if it is neither."""
        out = np.zeros(2, np.int64)
        return _lease(out) if self._lib.thimble_slots_lease(self._handle, key, int(why), _pointer(out)) else None

    def load(self, key: int, why: Why) -> Lease | None:
        """A slot for the block, leased unless for prefetch; None if the block is here or no slot can be had."""
        out = np.zeros(2, np.int64)
        return _lease(out) if self._lib.thimble_slots_load(self._handle, key, int(why), _pointer(out)) else None

    def arrived(self, lease: Lease, ok: bool) -> bool:
        """The read has ended. False if the lease is not of a load under way."""
        return bool(self._lib.thimble_slots_arrived(self._handle, _pointer(_array(lease)), ok))

    def release(self, lease: Lease) -> bool:
        """False if the lease is of an older life of the slot, or none is out."""
        return bool(self._lib.thimble_slots_release(self._handle, _pointer(_array(lease))))

    def sound(self) -> bool:
        return bool(self._lib.thimble_slots_sound(self._handle))

    def at(self, slot: int) -> Slot:
        out = np.zeros(4, np.int64)
        self._lib.thimble_slots_at(self._handle, slot, _pointer(out))
        state, key, generation, leases = out.tolist()
        return Slot(State(state), key, generation, leases)

    def counts(self) -> SlotCounts:
        out = np.zeros(4, np.int64)
        self._lib.thimble_slots_counts(self._handle, _pointer(out))
        return SlotCounts(*out.tolist())


def _pointer(array: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _array(lease: Lease) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.array([lease.slot, lease.generation], np.int64)


def _lease(out: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Lease:
    return Lease(int(out[0]), int(out[1]))
