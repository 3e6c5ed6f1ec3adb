"""The routed experts as the model sees them. Owns the protocol and the choice of an implementation, not the arithmetic
(kernels/experts/reference.py) and not the file (services/engine/experts/store.py).
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from kernels.block import Bytes
from kernels.build import BuildError
from kernels.experts import reference
from kernels.experts.host.binding import BlockError, Catalog, Copy, Host, HostError, open_drives, read_rate
from kernels.experts.host.drives import Drive, choose_depth
from kernels.experts.host.replay import SHIPPED
from kernels.workers.pool import SPIN_US, Workers, use_threads
from services.engine.errors import DiskError, MemoryPlanError, StepError, StoreError
from services.engine.experts.store import Store
from services.engine.experts.trace import Recorder
from services.engine.experts.warm import Keys, Warm, WarmSet

log = logging.getLogger(__name__)

LEAST_READERS = 2  # of those found at start: one is kept free of prefetch


@dataclass(frozen=True)
class Counters:
    """What happened since the start. A lookup is one distinct expert of one step; a hit found its block in RAM.

    `sweep_blocks`: handed to a GPU that reads a prompt. `disk_wait_s` is of steps and of such sweeps.
    """

    hits: int
    misses: int
    prefetch_issued: int
    prefetch_useful: int
    prefetch_wasted: int
    demand_read_bytes: int
    prefetch_read_bytes: int
    disk_wait_s: float
    compute_s: float
    evictions: int
    slots_total: int
    slots_used: int
    sweep_blocks: int = 0


class Experts(Protocol):
    """One per engine, used by the thread that owns the model; `prefetch` alone may be called beside it."""

    def step(self, layer: int, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        """ids int32 [M, k], weights float32 [M, k], x float32 [M, latent] -> float32 [M, latent].

        `layer` counts MoE layers. Column order of ids is router rank. A row of x with a NaN or Inf comes back as NaN.
        Raises StepError, naming the expert, if a block cannot be read; the next step works again.
        """
        ...

    def prefetch(self, layer: int, ids: Tensor) -> None:
        """A hint: these experts (int32, 1-D) may be needed soon. Never ahead of a demand read; never an error."""
        ...

    @property
    def prefetching(self) -> bool:
        """Whether hints are of any use now."""
        ...

    def counters(self) -> Counters: ...

    def check(self) -> None:
        """Conservation: free + used + in flight = total. Raises AssertionError otherwise."""
        ...

    def close(self) -> None: ...


class HostExperts:
    """Through the C++ library: readers fill slots with O_DIRECT, the worker pool computes where the bytes lie.

    `host` is for a GPU that shares the work; `closing` is called before it is closed. `on_card` says which blocks that
    GPU has in its own memory, the coldest first, until the end.
    """

    def __init__(
        self,
        store: Store,
        workers: Workers,
        *,
        slots: int,
        readers: int,
        lock_memory: bool,
        copies: tuple[Copy, ...] = (),
        warm: WarmSet | None = None,
        prefetch: str = "auto",
        trace: Recorder | None = None,
        drafts: bool = False,
        drives: Sequence[Drive] | None = None,
    ) -> None:
        """Raises DiskError if a file cannot be opened, MemoryPlanError if the memory or threads cannot be had."""
        blocks = catalog(store, copies, drafts)
        self._paths = [blocks.path, *(copy.path for copy in copies)]
        try:
            drives = open_drives(blocks) if drives is None else drives
        except HostError as error:
            raise DiskError(str(error)) from error
        if not readers:
            readers, rates = choose_depth(lambda depth: read_rate(blocks, drives, depth, seed=depth))
            tried = ", ".join(f"{depth}: {rate:.2f}" for depth, rate in rates.items())
            readers = max(LEAST_READERS, readers)
            log.info("disk: %d reads in flight (GB/s by reads in flight: %s)", readers, tried)
        try:
            self.closing: list[Callable[[], None]] = []
            self.host = Host(
                blocks,
                workers,
                slots=slots,
                readers=readers,
                lock_memory=lock_memory,
                drives=drives,
                prefetch=prefetch,
            )
        except HostError as error:
            raise MemoryPlanError(f"a cache of {slots} experts cannot be had: {error}") from error
        self.on_card: Callable[[], Keys] = lambda: np.empty(0, np.int32)
        self._tell()
        self._warm = warm
        self._filled = warm is not None  # before the first request
        self._trace = trace
        if trace is not None:
            trace.attach(
                lambda: {**asdict(self.counters()), "policy": SHIPPED, "prefetch": prefetch, "warm": self._filled}
            )

    def begin_warm(self) -> None:
        """Start reading what was in RAM before, and keep what is from now on. Slots can be given up until then."""
        self._filled |= self.host.counters()["slots_used"] > 0  # by a GPU's graphs
        heat = np.zeros_like(self.host.heat())  # what a GPU's graphs named when they were captured nobody asked for
        known = None if self._warm is None else self._warm.load()
        if known is not None:
            heat[: len(known.heat)] = known.heat
        self.host.set_heat(heat)
        if self._warm is not None and known is not None:
            self.host.warm(known.keys)
            self._warm.keep(self._held)

    def step(self, layer: int, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        try:
            return self.host.step(layer, ids, weights, x)
        except BlockError as error:
            raise StepError(self.told(str(error))) from error

    def told(self, said: str) -> str:
        """What a client hears of a failed read: not where the files are, which the log says."""
        for path in self._paths:
            said = said.replace(str(path), path.name)
        return said

    def prefetch(self, layer: int, ids: Tensor) -> None:
        self.host.prefetch(layer, ids.numpy())

    @property
    def prefetching(self) -> bool:
        return self.host.prefetching

    def counters(self) -> Counters:
        self._tell()
        values = self.host.counters()
        waited, total = values.pop("disk_wait_ns") * 1e-9, values.pop("total_ns") * 1e-9
        swept = values.pop("sweep_wait_ns") * 1e-9
        return Counters(**values, disk_wait_s=waited + swept, compute_s=total - waited)

    def check(self) -> None:
        self.host.check()

    def close(self) -> None:
        try:
            while self.closing:
                self.closing.pop()()
        finally:
            self._close()

    def _close(self) -> None:
        if self._trace is not None:
            self._trace.close()
        if self._warm is not None:
            self._warm.close()
            self._warm.save(self._held())
        self.host.close()

    def _held(self) -> Warm:
        """A card's own blocks are the hottest, and come back to it by way of RAM."""
        own = self.on_card()
        resident = self.host.resident()
        return Warm(np.concatenate([resident[~np.isin(resident, own)], own]), self.host.heat())

    def _tell(self) -> None:
        for notice in self.host.notices():
            log.warning(notice)


class PythonExperts:
    """Without a compiler: the same bits through the reference, many times slower. Reads when asked, never ahead."""

    def __init__(self, store: Store, *, slots: int, trace: Recorder | None = None, drafts: bool = False) -> None:
        self._trace = trace
        if trace is not None:
            trace.attach(lambda: {**asdict(self.counters()), "policy": "lru", "prefetch": "off", "warm": False})
        self._store = store
        self._slots: OrderedDict[tuple[int, int], Bytes] = OrderedDict()  # the least recently used first
        self._total = min(slots, sum(map(len, store.layers if drafts else store.blocks)))
        self._hits = self._misses = self._evictions = 0
        self._wait_s = self._step_s = 0.0

    def step(self, layer: int, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        begin = time.perf_counter()
        try:
            return reference.step(ids, weights, x, lambda id: self._expert(layer, id))
        finally:
            self._step_s += time.perf_counter() - begin

    def prefetch(self, layer: int, ids: Tensor) -> None:
        """Does nothing: one thread reads and computes."""

    @property
    def prefetching(self) -> bool:
        return False

    def counters(self) -> Counters:
        read_bytes = self._misses * self._store.layout.block_bytes
        compute_s = self._step_s - self._wait_s
        counted = (self._hits, self._misses, 0, 0, 0, read_bytes, 0, self._wait_s, compute_s, self._evictions)
        return Counters(*counted, self._total, len(self._slots))

    def check(self) -> None:
        assert len(self._slots) <= self._total, f"{len(self._slots)} blocks in {self._total} slots"

    def close(self) -> None:
        if self._trace is not None:
            self._trace.close()
        self._slots.clear()

    def _expert(self, layer: int, id: int) -> reference.Expert:
        block = self._store.layers[layer][id]
        return reference.unpack_expert(self._bytes(layer, id), self._store.layout, block.up_scale, block.down_scale)

    def _bytes(self, layer: int, id: int) -> Bytes:
        if (layer, id) in self._slots:
            self._hits += 1
            self._slots.move_to_end((layer, id))
            return self._slots[layer, id]
        self._misses += 1
        if len(self._slots) == self._total:
            self._slots.popitem(last=False)
            self._evictions += 1
        begin = time.perf_counter()
        try:
            self._slots[layer, id] = self._store.read_block(layer, id)
        except (StoreError, OSError) as error:
            said = str(error).replace(str(self._store.folder) + "/", "")
            raise StepError(f"MoE layer {layer}, expert {id}: {said}") from error
        finally:
            self._wait_s += time.perf_counter() - begin
        return self._slots[layer, id]


def open_experts(
    store: Store,
    *,
    slots: int,
    readers: int = 4,
    workers: int = 0,
    lock_memory: bool = False,
    copies: tuple[Copy, ...] = (),
    warm: WarmSet | None = None,
    prefetch: str = "auto",
    trace: Recorder | None = None,
    spin_us: int = SPIN_US,
    drafts: bool = False,
    drives: Sequence[Drive] | None = None,
) -> Experts:
    """The fastest way that this machine has. `slots` blocks in RAM (more than there are: all), `readers` threads on the
    disk (0: as many as measure best), `workers` threads of the process's shared pool (0: cores less two), which stay
    awake for `spin_us`, `copies` of blocks on other disks, `warm` what was in RAM before, `prefetch` on, off or auto:
    as long as it pays. `trace` is closed with the experts. `drafts`: with the multi-token-prediction block's experts as
    one more layer. `drives`: what stands for the disks in a benchmark. Same bits whatever is given.

    Raises DiskError or MemoryPlanError if it cannot be had.
    """
    try:
        pool = use_threads(workers, spin_us)
    except BuildError as error:
        log.warning("experts are computed in Python: %s", error)
        return PythonExperts(store, slots=slots, trace=trace, drafts=drafts)
    except OSError as error:
        raise MemoryPlanError(str(error)) from error
    return HostExperts(
        store,
        pool,
        slots=slots,
        readers=readers,
        lock_memory=lock_memory,
        copies=copies,
        warm=warm,
        prefetch=prefetch,
        trace=trace,
        drafts=drafts,
        drives=drives,
    )


def catalog(store: Store, copies: tuple[Copy, ...] = (), drafts: bool = False) -> Catalog:
    """The store's blocks as the library takes them, with those of the multi-token-prediction block if `drafts`."""
    layers = store.layers if drafts else store.blocks
    shape = len(layers), len(layers[0])
    blocks = [block for layer in layers for block in layer]
    if drafts:  # which no copy on another disk has
        more = np.full((len(layers) - len(store.blocks), shape[1]), -1, np.int64)
        copies = tuple(replace(copy, offsets=np.concatenate([copy.offsets, more])) for copy in copies)

    def array(values: list[int] | list[float], dtype: type) -> Any:
        return np.array(values, dtype).reshape(shape)

    return Catalog(
        store.experts_path,
        store.layout,
        array([block.offset for block in blocks], np.int64),
        array([block.xxh64 for block in blocks], np.uint64),
        array([block.up_scale for block in blocks], np.float32),
        array([block.down_scale for block in blocks], np.float32),
        copies,
    )
