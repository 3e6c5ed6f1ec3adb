"""`thimble bench prefill STORE`: how long prompts take on this machine's GPU, by length and by what is in RAM.

For a synthetic store (`thimble synth`): its own random routers route. With --free-mib another process holds the card's
other memory. What is not in RAM comes from an emulated drive: memory that its readers copy at a drive's rate, on cores
that a prompt's experts do not need. How much of a prompt is read at once goes by what is free on the card, as in the
engine. Beside each time stands its floor: the largest of what the drive, the link and the tensor cores need by the
rates of the same run.

A run can be ended and started again: cells that --done names are left out. With --minutes a cell that will not be done
by then is left out as well, and a line says so.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import triton

from kernels.experts.device.rates import ReadRates
from kernels.experts.device.turns import SharedSlots
from kernels.experts.host.binding import Host
from kernels.experts.host.drives import EmulatedDrive
from kernels.workers.pool import Workers, default_threads
from services.engine.experts.store import Store
from services.engine.experts.streamer import catalog
from services.engine.gpu.decoder import Placement
from services.engine.gpu.ledger import CONTEXT_BYTES, MIB, Kv, Wanted, ledger, require, stored_layout
from services.engine.gpu.memory import DevicePool
from services.engine.gpu.model import DeviceModel
from services.engine.gpu.open import AWAKE_US
from services.engine.gpu.plan import CHUNKS
from services.engine.gpu.usable import usable_device
from services.engine.gpu.weights import DeviceWeights
from services.engine.model import DECODED_TOKENS, Segment
from services.engine.model_config import ModelConfig
from services.engine.pages import pages_for
from services.tools import figures
from services.tools.amounts import amount, amounts, count, wholes
from services.tools.ballast import Ballast
from services.tools.bench_dense import timed
from services.tools.cells import Cells, Value
from services.tools.decode_rig import READERS
from services.tools.drive_reads import DriveReads
from services.tools.progress import Progress

MATRIX = 8192  # side of the product that the tensor cores' rate is measured with
WARMING = 600  # tokens read first, not timed
DECODED = 12  # tokens through the decode path, to compare with
FILLED_GB_S = 1000.0  # of the drive while slots are filled: as fast as it goes
SLOWER = 2.0  # than its floor: what a cell is assumed to take until one is measured
MARGIN = 1.1  # of what it is assumed to take after that, for it is a longer one
LINK_GB_S = 20.0  # assumed for that
SAYS_S = 10.0  # between two lines of a long cell
HEADING = (
    f"{'tokens':>7}{'in RAM':>8}{'first token s':>15}{'tok/s':>9}{'floor s':>9}{'of floor':>10}{'moved':>8}"
    f"{'read':>9}{'x decode':>10}"
)


@dataclass(frozen=True)
class Cell:
    """`moved`: blocks copied to the card over blocks that were named, chunk by chunk. `read`: blocks that the drive
    carried and that were named. `floors`: seconds of drive, link and tensor cores. `decode_s`: the prompt token by
    token, from the time of a few."""

    tokens: int
    share: float
    seconds: float
    floors: tuple[float, float, float]
    moved: float
    read: int
    decode_s: float

    @property
    def floor_s(self) -> float:
        return max(self.floors)

    def __str__(self) -> str:
        return (
            f"{self.tokens:>7}{self.share:>8.2f}{self.seconds:>15.2f}{self.tokens / self.seconds:>9.0f}"
            f"{self.floor_s:>9.2f}{self.floor_s / self.seconds:>10.0%}{self.moved:>8.2f}{self.read:>9}"
            f"{self.decode_s / self.seconds:>10.1f}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", type=Path, help="folder that `thimble synth` wrote")
    parser.add_argument("--tokens", type=wholes, default=[40, 512, 2048])
    parser.add_argument("--share", type=amounts, default=[1.0, 0.33, 0.24])
    parser.add_argument("--disk", type=amount, default=7.0, metavar="GB/S", help="of the emulated drive (default 7)")
    parser.add_argument(
        "--chunk", type=count, default=0, help="tokens read at once (default: as many as there is room for)"
    )
    parser.add_argument(
        "--rows",
        type=lambda text: tuple(wholes(text)),
        default=(1, 2, 4),
        help="that steps can have, for tokens that are decoded; fewer leave room for a longer prompt (default 1,2,4)",
    )
    parser.add_argument("--free-mib", type=count, default=8151, help="of the card, by ballast (default 8151; 0: all)")
    parser.add_argument("--kv", choices=("bf16", "fp8"), default="bf16", help="format of keys and values")
    parser.add_argument("--minutes", type=amount, help="leave out what will not be done by then (default: nothing)")
    parser.add_argument("--done", type=Path, help="file that remembers finished cells")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV file (its name names the machine)")


def run(args: argparse.Namespace) -> int:
    cells = Cells(args.minutes, args.done)
    store = Store.open(args.store)
    if not torch.cuda.is_available():
        print("bench prefill needs a CUDA device; thimble plan forecasts without one", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    memory = np.fromfile(store.experts_path, np.uint8)
    with ProcessPoolExecutor(1, get_context("spawn")) as other:  # here the vendor's library would stay on the card
        flops = other.submit(tensor_rate).result()
    with ExitStack() as stack:
        ballast = stack.enter_context(Ballast(args.free_mib)) if args.free_mib else None
        usable_device()
        print(f"synthetic, routed by random routers; tensor cores {flops / 1e12:.0f} TFLOP/s\n{HEADING}", flush=True)
        opening_s, slower = 0.0, SLOWER  # as long as the last one took
        for share in args.share:
            lengths = [
                tokens
                for tokens in args.tokens
                if cells.done(*cell_name(args, share, tokens)) is None
                and in_time(cells, tokens, share, opening_s + slower * least_s(store, tokens, share, args))
            ]
            if not lengths:
                continue
            begun = time.monotonic()
            with opened(store, memory, share, max(lengths), args, rows=args.rows) as bench:
                opening_s = time.monotonic() - begun
                for tokens in lengths:
                    least = least_s(store, tokens, share, args)
                    if not in_time(cells, tokens, share, slower * least):
                        continue
                    begun = time.monotonic()
                    cell = bench.measure(tokens, share, flops)
                    slower = MARGIN * (time.monotonic() - begun) / least
                    print(cell, flush=True)
                    note = bench.note(cell)
                    if ballast is not None:
                        peak = ballast.peak_bytes()
                        print(f"{'':>7} most graphics memory {peak / MIB:.0f} MiB", flush=True)
                        if args.out:
                            figures.append(args.out, "prefill.peak_vram_gb", peak / 2**30, "GiB", note)
                    if args.out:
                        record(args.out, cell, note)
                    cells.finish(*cell_name(args, share, tokens))
            del bench  # it holds the card's memory, which the next share needs
    return 0


def in_time(cells: Cells, tokens: int, share: float, needed_s: float) -> bool:
    return cells.fits(f"{tokens:>7}{share:>8.2f}", needed_s)


def least_s(store: Store, tokens: int, share: float, args: argparse.Namespace) -> float:
    """What a cell takes at least, the tokens that are decoded for comparison included."""
    config, layers = store.config, len(store.blocks)
    chunk = args.chunk or CHUNKS[0]
    chunks = [min(chunk, tokens - begin) for begin in range(0, tokens, chunk)]
    swept = layers * sum(min(config.experts, count * config.experts_per_token) for count in chunks)
    decoded = layers * DECODED * config.experts_per_token
    block_gb = store.layout.block_bytes / 1e9
    read_s = (1 - share) * (swept + decoded) * block_gb / args.disk
    return float(max(read_s, (swept + decoded) * block_gb / LINK_GB_S))


def cell_name(args: argparse.Namespace, share: float, tokens: int) -> tuple[Value, ...]:
    return (args.store.name, share, tokens, args.disk, args.chunk, args.kv, args.free_mib, str(args.rows))


def record(out: Path, cell: Cell, note: str) -> None:
    figures.append(out, "prefill.ttft_s", cell.seconds, "s", note)
    figures.append(out, "prefill.tok_s", cell.tokens / cell.seconds, "tok/s", note)
    if cell.tokens > DECODED_TOKENS:  # shorter ones take the decode path, whose experts move by other rules
        figures.append(out, "prefill.floor_share", cell.floor_s / cell.seconds, "ratio", note)
        figures.append(out, "prefill.moved_per_named", cell.moved, "ratio", note)
    figures.append(out, "prefill.over_decode", cell.decode_s / cell.seconds, "ratio", note)


@contextmanager
def opened(
    store: Store,
    memory: npt.NDArray[np.uint8],
    share: float,
    tokens: int,
    args: argparse.Namespace,
    places: int = 1,
    *,
    rows: tuple[int, ...],
) -> Iterator["PrefillBench"]:
    """Slots for `share` of the experts, full; a model for prompts of so many tokens in so many places, whose steps can
    have so many `rows`."""
    layers, experts = len(store.blocks), store.config.experts
    resident = min(experts, max(store.config.experts_per_token, round(share * experts)))
    drive = EmulatedDrive(memory, gb_s=args.disk if resident < experts else FILLED_GB_S)
    workers = Workers(default_threads(), AWAKE_US)
    host = Host(catalog(store), workers, slots=layers * resident, readers=READERS, drives=[drive])
    begun = time.perf_counter()
    with ExitStack() as stack:
        stack.callback(host.close)
        shared = SharedSlots(host)
        stack.callback(shared.close)
        link_gb_s = ReadRates(shared).copy()
        torch.cuda.empty_cache()
        progress = Progress("slots", layers * resident * store.layout.block_bytes)
        ids = torch.arange(resident, dtype=torch.int32).view(1, -1)
        for layer in range(layers):
            host.step(layer, ids, torch.ones(ids.shape), torch.ones(1, store.layout.latent))
            progress.update((layer + 1) * resident * store.layout.block_bytes)
        progress.close()
        device = torch.device("cuda")
        weights = DeviceWeights.load(store.dense(), store.config, device)
        weights.embeddings.read_through()
        context = tokens + DECODED + 1
        kv: Kv = "fp8" if args.kv == "fp8" else "bf16"
        wanted = Wanted(places, context, kv, joined=rows[-1] > places)
        chunk = args.chunk or room_for(store, wanted, torch.cuda.mem_get_info()[0] + weights.size_bytes)
        pool = DevicePool(store.config, device, places=places, pages=places * pages_for(context), kv=kv)
        model = DeviceModel(
            weights,
            pool,
            shared,
            rows=rows,
            context_tokens=context,
            chunk_tokens=chunk,
            placement=Placement(),
        )
        stack.callback(model.close)
        print(
            f"{resident} of {experts} experts a layer in RAM, chunks of {chunk}, ready after "
            f"{time.perf_counter() - begun:.0f} s",
            flush=True,
        )
        bench = PrefillBench(store, host, model, link_gb_s, args)
        bench.measure(min(tokens, WARMING), share, 1.0)
        yield bench
        del model, pool, weights


def room_for(store: Store, wanted: Wanted, free_bytes: int) -> int:
    """The most tokens of a prompt at once, with `free_bytes` for all that the ledger counts but a CUDA context and page
    tables, which are there. Raises MemoryPlanError."""
    layout, budget_bytes = stored_layout(store.folder), free_bytes + CONTEXT_BYTES
    tried = [replace(wanted, chunk_tokens=chunk) for chunk in CHUNKS if chunk]
    for each in tried:
        if ledger(store.config, layout, each).total_bytes <= budget_bytes:
            return each.chunk_tokens
    require(store.config, layout, tried[-1], budget_bytes)
    raise AssertionError("what does not fit is refused")


class PrefillBench:
    """One host's and one model's measurements."""

    def __init__(
        self, store: Store, host: Host, model: DeviceModel, link_gb_s: float, args: argparse.Namespace
    ) -> None:
        self.store, self.host, self.model, self.link_gb_s, self.args = store, host, model, link_gb_s, args
        assert model.sweep
        self.chunk = model.sweep.tokens
        self.random = np.random.default_rng(1)

    def measure(self, tokens: int, share: float, flops: float) -> Cell:
        assert self.model.sweep
        experts = self.model.sweep.experts
        ids = self.random.integers(0, self.store.config.vocab_size, tokens + DECODED).tolist()
        state = self.model.new_state(len(ids))
        before, copied = self.host.counters(), experts.copied_bytes
        named = experts.named_blocks
        torch.cuda.synchronize()
        begun = time.perf_counter()
        said = begun
        for part in self.model.reading([Segment(state, ids[:tokens], sweep=tokens > DECODED_TOKENS)]):
            now = time.perf_counter()
            if now - said >= SAYS_S:
                said = now
                print(f"{tokens:>7}{share:>8.2f} {part:.0%} after {now - begun:.0f} s", file=sys.stderr, flush=True)
        seconds = time.perf_counter() - begun
        after = self.host.counters()
        block = self.store.layout.block_bytes
        drive = DriveReads.between(before, after, block, self.args.disk)
        named = experts.named_blocks - named
        begun = time.perf_counter()
        for id_ in ids[tokens:]:
            self.model.forward([Segment(state, [id_])])
        token_s = (time.perf_counter() - begun) / DECODED
        state.release()
        floors = (
            drive.needed_ms / 1e3,
            named * block / (self.link_gb_s * 1e9),
            tokens * token_flops(self.store.config) / flops,
        )
        moved = (experts.copied_bytes - copied) / max(1, named * block)
        return Cell(tokens, share, seconds, floors, moved, round(drive.needed), tokens * token_s)

    def note(self, cell: Cell) -> str:
        drive, link, cores = cell.floors
        return (
            f"synthetic, {cell.tokens} tokens, {cell.share:.2f} of {self.store.config.experts} experts a layer in RAM, "
            f"chunks of {self.chunk}, KV {self.args.kv}, "
            f"{f'ballast to {self.args.free_mib} MiB' if self.args.free_mib else 'no ballast'}, emulated drive of "
            f"{self.args.disk:g} GB/s, {cell.read} blocks read; floors: drive {drive:.2f} s, link {link:.2f} s at "
            f"{self.link_gb_s:.1f} GB/s, tensor cores {cores:.2f} s; torch {torch.__version__}, "
            f"triton {triton.__version__}"
        )


def tensor_rate() -> float:
    """Of a large BF16 product through the vendor's library, in floating point operations a second."""
    both = torch.randn(2, MATRIX, MATRIX, device="cuda").bfloat16()
    return 2 * MATRIX**3 / timed(lambda: both[0] @ both[1])


def token_flops(config: ModelConfig) -> float:
    """Multiplications and additions of a prompt's token in all matrix products, without attention's scores."""
    attended, kv = config.attention_heads * config.head_dim, config.kv_heads * config.head_dim
    mamba = config.hidden_size * (config.in_proj_rows + config.mamba_inner)
    attention = config.hidden_size * (2 * attended + 2 * kv)
    routed = config.experts_per_token * 2 * config.latent_size * config.expert_width
    moe = config.hidden_size * (config.experts + 2 * config.latent_size + 2 * config.shared_width) + routed
    return 2.0 * (
        len(config.mamba_layers) * mamba + len(config.attention_layers) * attention + len(config.moe_layers) * moe
    )
