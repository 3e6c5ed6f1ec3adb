"""`thimble bench disk`: random verified blocks from a disk by reads in flight; or from the emulated drive, which shows
how far this machine's memory can play it.

Blocks are synthetic, in a file that is made for it and removed, or a store's own. Past the page cache.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kernels.block import BlockLayout
from kernels.experts.host.binding import Catalog, Host, open_drives, read_rate
from kernels.experts.host.drives import DEPTHS, Drive, EmulatedDrive, choose_depth
from kernels.workers.pool import Workers
from services.engine.experts.store import Store
from services.engine.experts.streamer import catalog
from services.tools import figures
from services.tools.amounts import amount
from services.tools.synthetic_blocks import SyntheticBlocks

LAYOUT = BlockLayout(1024, 2688)
BLOCKS = 331  # a gigabyte
LIMIT_NS = 1_000_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--store", type=Path, help="read this store's blocks")
    what.add_argument("--folder", type=Path, default=Path(), help="make a gigabyte of blocks here (default: here)")
    what.add_argument("--emulate", type=amount, metavar="GB/S", help="a drive of that speed, played by memory")
    parser.add_argument("--out", type=Path, help="append disk.read_gb_s to this CSV file (its name names the machine)")


def run(args: argparse.Namespace) -> int:
    if args.store:
        blocks = catalog(Store.open(args.store))
        return report(args, blocks, open_drives(blocks), f"store, blocks of {blocks.layout.block_bytes} bytes")
    made = SyntheticBlocks(LAYOUT, layers=1, experts=BLOCKS)
    if args.emulate:
        memory, blocks = made.memory(BLOCKS)
        drive = EmulatedDrive(memory, gb_s=args.emulate)
        status = report(args, blocks, [drive], f"emulated drive of {args.emulate:g} GB/s")
        counts = drive.counts()
        late = counts.late_s / max(counts.busy_s, 1e-9)
        print(
            f"memory was too slow for the drive by {100 * late:.1f} % of the time that it was busy, summed over reads"
        )
        return status
    with tempfile.NamedTemporaryFile(dir=args.folder, prefix="thimble-bench-", suffix=".blocks") as file:
        blocks = made.write(Path(file.name))
        return report(args, blocks, open_drives(blocks), f"file of {BLOCKS} synthetic blocks, O_DIRECT")


def report(args: argparse.Namespace, blocks: Catalog, drives: Sequence[Drive], what: str) -> int:
    print(f"{what}; GB/s by reads in flight:")
    rates = {}
    for depth in DEPTHS:
        found = [read_rate(blocks, drives, depth, LIMIT_NS, seed=100 * depth + number) for number in range(3)]
        rates[depth] = float(np.median(found))
        print(f"  {depth:3}  {rates[depth]:6.2f}   ({min(found):.2f} to {max(found):.2f})", flush=True)
    best, _ = choose_depth(rates.__getitem__, tuple(rates))
    print(f"{best} reads in flight are enough")
    seconds = warm_start_s(blocks, drives, best)
    size_gb = blocks.offsets.size * blocks.layout.block_bytes / 1e9
    print(f"a warm start brings {blocks.offsets.size} blocks, {size_gb:.2f} GB, back in {seconds:.2f} s")
    if args.out:
        note = f"{what}, {best} reads in flight"
        figures.append(args.out, "disk.read_gb_s", rates[best], "GB/s", f"{note}, median of 3")
        figures.append(args.out, "disk.warm_start_gb_s", size_gb / seconds, "GB/s", note)
    return 0


def warm_start_s(blocks: Catalog, drives: Sequence[Drive], readers: int) -> float:
    """Until every block is in RAM, read in the background by a host that does nothing else."""
    host = Host(blocks, Workers(1), slots=blocks.offsets.size, readers=readers, drives=drives)
    try:
        begun = time.perf_counter()
        host.warm(np.arange(blocks.offsets.size))
        while host.counters()["slots_used"] < blocks.offsets.size:
            time.sleep(0.005)
        return time.perf_counter() - begun
    finally:
        host.close()
