"""`thimble bench vram STORE`: what takes a card's memory beside the tensors, one thing after the other, by the driver.

The context, with and without what it sets aside; page tables of page-locked RAM, by how it is locked; kernels and
graphs of decode and of sweeps. Where the ledger's assumptions come from; beside each stands what it counts.
"""

import argparse
import gc
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton

from kernels.experts.device.turns import SharedSlots
from kernels.experts.host.binding import Host
from kernels.workers.pool import Workers, default_threads
from services.engine.experts.store import Store
from services.engine.experts.streamer import catalog
from services.engine.gpu import ledger
from services.engine.gpu.ledger import MIB
from services.engine.gpu.locking import measured_share
from services.engine.gpu.memory import DevicePool
from services.engine.gpu.model import DeviceModel
from services.engine.gpu.open import AWAKE_US
from services.engine.gpu.usable import usable_device
from services.engine.gpu.weights import DeviceWeights
from services.engine.pages import pages_for
from services.tools import figures
from services.tools.amounts import whole
from services.tools.ballast import Ballast
from services.tools.decode_rig import READERS

STEP_BYTES = 1 << 30
SLOTS = 256
CONTEXT_TOKENS = 1024
PAGES = pages_for(CONTEXT_TOKENS)
HUGE_PAGES = 14  # MADV_HUGEPAGE
LOCKED = ("pages of 4 KiB", "huge pages, where the system has them", "cudaHostAlloc")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="folder that `thimble synth` or `thimble repack` wrote")
    parser.add_argument("--free-mib", type=whole, default=8151, help="of the card, by ballast (default 8151)")
    parser.add_argument(
        "--locked", type=whole, default=6, metavar="GIB", help="of RAM, to lock in each way (default 6)"
    )
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")


def run(args: argparse.Namespace) -> int:
    store = Store.open(args.store)
    if not torch.cuda.is_available():
        print("bench vram needs a CUDA device; thimble ledger says what is counted", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    with Ballast(args.free_mib):
        bench = Bench(args, args.free_mib * MIB)
        bench.context()
        bench.locked(args.locked)
        bench.model(store)
    return 0


@dataclass
class Bench:
    """`before_bytes`: what was free at the last look."""

    args: argparse.Namespace
    before_bytes: int
    reserved_bytes: int = 0
    found: dict[str, float] = field(default_factory=dict)

    def take(self) -> float:
        """MiB that went since the last look, without torch's tensors."""
        torch.cuda.synchronize()
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        taken = self.before_bytes - free - (reserved - self.reserved_bytes)
        self.before_bytes, self.reserved_bytes = free, reserved
        return taken / MIB

    def say(self, name: str, value: float, unit: str, what: str, counted: float | None = None) -> None:
        beside = "" if counted is None else f" (the ledger counts {counted:.1f})"
        print(f"{name:28}{value:>10.2f} {unit:<8} {what}{beside}", flush=True)
        self.found[name] = value
        if self.args.out:
            made = f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}"
            figures.append(self.args.out, name, value, unit, f"{what}, {made}")

    def context(self) -> None:
        self.say("vram.context_mib", self.take(), "MiB", "context", ledger.CONTEXT_BYTES / MIB)
        usable_device()
        self.say("vram.limits_mib", -self.take(), "MiB", "given back by lower limits")
        tensor = torch.empty(1, device="cuda")
        self.say("vram.tensor_mib", self.take(), "MiB", "the first tensor, beside it")
        tensor.zero_()
        self.say("vram.torch_mib", self.take(), "MiB", "torch's first kernel")
        tensor.add_(1)
        self.say("vram.torch_again_mib", self.take(), "MiB", "torch's second")

    def locked(self, gib: int) -> None:
        share, counted = measured_share() * 1024, ledger.LOCKED_SHARE * 1024
        self.say("vram.locked_mib", share, "MiB/GiB", "page tables of the same pages again and again", counted)
        self.take()
        for way in LOCKED:
            with locked(way, gib):
                self.say("vram.locked_mib", self.take() / gib, "MiB/GiB", f"page tables of {gib} GiB, {way}", counted)
            self.say("vram.unlocked_mib", -self.take() / gib, "MiB/GiB", f"given back, {way}")

    def model(self, store: Store) -> None:
        weights = DeviceWeights.load(store.dense(), store.config, torch.device("cuda"))
        self.say("vram.loading_mib", self.take(), "MiB", "loading weights, beside them", 0.0)
        workers = Workers(default_threads(), AWAKE_US)
        with ExitStack() as stack:
            host = Host(catalog(store), workers, slots=SLOTS, readers=READERS)
            stack.callback(host.close)
            slots = SharedSlots(host)
            stack.callback(slots.close)
            self.take()
            cases = (
                ("vram.kernels_mib", (1,), 0, "kernels and the graph of one row", ledger.KERNEL_BYTES),
                ("vram.kernels_again_mib", (1,), 0, "the graph of one row again", None),
                ("vram.graph_mib", (1, 2), 0, "and of two rows", ledger.GRAPH_BYTES),
                ("vram.sweep_mib", (1,), 256, "a graph, and the kernels of sweeps", ledger.SWEEP_KERNEL_BYTES),
            )
            for name, rows, chunk, what, counted in cases:
                pool = DevicePool(store.config, weights.layers[0].norm.weight.device, places=1, pages=PAGES)
                model = DeviceModel(weights, pool, slots, rows=rows, context_tokens=CONTEXT_TOKENS, chunk_tokens=chunk)
                self.say(name, self.take(), "MiB", what, None if counted is None else counted / MIB)
                model.close()
                del model, pool
                gc.collect()
                torch.cuda.empty_cache()
                self.say(f"{name}_back", -self.take(), "MiB", "of which given back")


@contextmanager
def locked(way: str, gib: int) -> Iterator[None]:
    """So much RAM, one GiB after the other."""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    undo: list[Callable[[], object]] = []
    held = []
    for _ in range(gib):
        if way == "cudaHostAlloc":
            held.append(torch.empty(STEP_BYTES, dtype=torch.uint8, pin_memory=True).numpy())
            continue
        memory = mmap.mmap(-1, STEP_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if way.startswith("huge"):
            memory.madvise(HUGE_PAGES)
        held.append(np.frombuffer(memory, np.uint8))
        address = held[-1].ctypes.data
        if int(runtime.cudaHostRegister(address, STEP_BYTES, 0)):
            raise RuntimeError(f"the system does not lock {gib} GiB: give a smaller --locked")
        undo.append(partial(runtime.cudaHostUnregister, address))
    try:
        yield
    finally:
        for each in undo:
            each()
        held.clear()
        if empty := getattr(torch._C, "_host_emptyCache", None):
            empty()
