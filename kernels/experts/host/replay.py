"""Routing replayed through the host library's own policies (replay.cpp). Owns the arrays on their way, no decision."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.workers.pool import native

MOST_AHEAD = 2
POLICIES = ("lru", "lfu", "lrfu", "layered", "s3fifo", "sieve", "quota")
SHIPPED = "shipped"  # whichever of them the engine runs
OPTIMUM = "belady"  # knows the future: for comparison only
PREFETCH = ("off", "on", "auto")  # the numbers of trial.h's Prefetching

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Routing:
    """Which experts were named when: `ids` [rows, k] of all steps one after the other, in router rank.

    Step s is MoE layer `layer[s]` for the tokens of rows `first[s]` to `first[s + 1]`. `guesses[a]` [rows, k] is what
    was guessed there for the layer a + 1 further on, by score, -1 for none.
    """

    layers: int
    experts: int
    layer: npt.NDArray[np.int32]
    first: npt.NDArray[np.int64]
    ids: Ids
    guesses: tuple[Ids, ...] = ()

    def __post_init__(self) -> None:
        steps, rows = len(self.layer), len(self.ids)
        if (
            self.first.shape != (steps + 1,)
            or self.first[0] != 0
            or self.first[-1] != rows
            or (np.diff(self.first) < 1).any()
        ):
            raise ValueError("routing: `first` does not divide the rows into steps")
        if steps and (self.layer.min() < 0 or self.layer.max() >= self.layers):
            raise ValueError("routing: a layer that there is not")
        if rows and (self.ids.min() < 0 or self.ids.max() >= self.experts):
            raise ValueError("routing: an expert that there is not")
        if len(self.guesses) > MOST_AHEAD:
            raise ValueError(f"routing: guesses for at most {MOST_AHEAD} layers")
        for guess in self.guesses:
            if guess.shape != self.ids.shape or (rows and guess.max() >= self.experts):
                raise ValueError("routing: guesses that do not fit")

    @property
    def rows_of_step(self) -> npt.NDArray[np.int64]:
        return np.diff(self.first)


def hinted(top_k: int) -> int:
    """How many of a token's guesses are worth reading ahead: a router that is early is mostly right about its first
    choices and mostly wrong about its last ones. tests/bench/results/LOG.md says why two thirds."""
    return max(1, 2 * top_k // 3)


@dataclass(frozen=True)
class Clock:
    """What a layer costs, as services/tools/predict.py's Layer has it. `in_flight` prefetches at once; `under_way`: the
    share of a block that these have been asked of the disk at once, so that a demanded block waits for it; `beside`:
    they begin before the last demanded block is checked."""

    gap_ns: float = 1e6
    expert_ns: float = 30e3
    read_ns: float = 400e3
    overlapped: bool = True
    prefetch: str = "off"
    ranks: int = 0  # of each token's guesses, so many of the first are hints; 0: as the engine
    ahead: int = 1  # for so many layers
    in_flight: int = 3
    late_ns: float = 0.0
    under_way: float = 5 / 8  # as the cache, by its AHEAD and the pieces of a large block
    beside: bool = True  # as the cache


@dataclass(frozen=True)
class Counts:
    """Of a replay. Lookups are distinct experts of a step; reads those that were neither there nor on their way."""

    decode_lookups: int
    decode_hits: int
    decode_reads: int
    sweep_lookups: int
    sweep_hits: int
    sweep_reads: int
    prefetch_issued: int
    prefetch_useful: int
    prefetch_wasted: int
    evictions: int
    decode_ns: int
    decode_waited_ns: int
    sweep_ns: int

    @property
    def hit_rate(self) -> float:
        return self.decode_hits / self.decode_lookups

    def hidden(self, clock: Clock) -> float:
        """Share of the time of the missing blocks' reads, one after the other, that no step waited for."""
        misses = self.decode_lookups - self.decode_hits
        return 1 - self.decode_waited_ns / (misses * clock.read_ns) if misses else 1.0


class _Trace(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_int),
        ("experts", ctypes.c_int),
        ("top_k", ctypes.c_int),
        ("steps", ctypes.c_int64),
        ("layer", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("guesses", ctypes.c_void_p * MOST_AHEAD),
    )


class _Options(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_double) for name in ("gap_ns", "expert_ns", "read_ns", "late_ns", "ahead_ns")),
        *((name, ctypes.c_int) for name in ("beside", "overlapped", "prefetch", "ranks", "ahead", "in_flight")),
    )


def replay(routing: Routing, policy: str, slots: Sequence[int], clock: Clock | None = None) -> list[Counts]:
    """One result for each number of slots. Raises ValueError if there is no such policy."""
    clock = clock or Clock()
    if not slots or min(slots) < 1 or clock.in_flight < 1:
        raise ValueError("replay: at least one slot and one read in flight")
    arrays: list[npt.NDArray[Any]] = [np.ascontiguousarray(routing.layer, np.int32)]
    arrays.append(np.ascontiguousarray(routing.first, np.int64))
    arrays += [np.ascontiguousarray(ids, np.int32) for ids in (routing.ids, *routing.guesses)]
    layer, first, ids, *guesses = (int(array.ctypes.data) for array in arrays)
    top_k = routing.ids.shape[1]
    pointers = (ctypes.c_void_p * MOST_AHEAD)(*guesses)
    trace = _Trace(routing.layers, routing.experts, top_k, len(routing.layer), layer, first, ids, pointers)
    ranks = min(clock.ranks, top_k) or hinted(top_k)
    options = _Options(
        *(clock.gap_ns, clock.expert_ns, clock.read_ns, clock.late_ns, clock.under_way * clock.read_ns),
        *(clock.beside, clock.overlapped),
        *(PREFETCH.index(clock.prefetch), ranks, min(clock.ahead, MOST_AHEAD), clock.in_flight),
    )
    sizes = np.minimum(slots, routing.layers * routing.experts).astype(np.int32)
    out = np.zeros((len(sizes), len(fields(Counts))), np.int64)
    done = native().thimble_replay(
        ctypes.byref(trace),
        ctypes.byref(options),
        policy.encode(),
        len(sizes),
        ctypes.c_void_p(sizes.ctypes.data),
        ctypes.c_void_p(out.ctypes.data),
    )
    if not done:
        raise ValueError(f"there is no cache policy {policy!r}")
    return [Counts(*row) for row in out.tolist()]
