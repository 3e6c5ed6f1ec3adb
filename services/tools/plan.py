"""`thimble plan`: what a machine will do with the model, on paper: memory, speed with its parts, what would help most.

For this machine (measured, under 30 s; --gpu or --ram put another card or size in it), or for a PC that is not here:
--gpu and --ram, of which nothing is measured; what --dram and --disk do not say of it is assumed, and told. Owns the
command and what it prints; the formula is predict.py, its assumptions forecast.py.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from kernels.workers.pool import Workers, default_threads
from services.engine.experts.store import Store
from services.engine.gpu import ledger as vram
from services.engine.gpu.plan import CHUNKS
from services.engine.model_config import ModelConfig
from services.engine.state import state_bytes
from services.tools import figures, measure
from services.tools.amounts import MOST, amount, nothing_or_more, whole
from services.tools.complaints import UsageError
from services.tools.draft_forecast import ACCEPTED, REPEATED, block_bytes, two_tokens
from services.tools.forecast import Ours, Published, first_token, ours, published, upgrades
from services.tools.hardware import CARDS, DDR5_GB_S, NVME_GB_S, Box, Card, box
from services.tools.predict import GB, Rates, Shape, Token
from services.tools.ram_ledger import PlanError, RamLedger, RamWanted, ram_ledger
from services.tools.synthetic_shapes import SUPER, dense_layout

WORTH = 1.02  # an upgrade that gives less is none
PROMPTS = (40, 512, 2048, 8192, 32768)
OSRELEASE = Path("/proc/sys/kernel/osrelease")
LEFT_BYTES = 256 * vram.MIB  # of a card, that nothing is planned for, before experts are kept there
LEAST_KEPT = 0.01  # of all experts
GIB_IN_GB = 2**30 / GB  # RAM is sold in GiB
# Median of "late" in the notes of decode.home_tok_s_* at 3cff93d, tests/bench/results/h200-x2-32core.csv: emulated
# drives on a virtual machine, where a thread that sleeps takes long to wake.
LATEST_US = 340.0


@dataclass(frozen=True)
class Range:
    low: float
    high: float

    @staticmethod
    def parse(text: str) -> "Range":
        """`12` or `7-12`."""
        low, _, high = text.partition("-")
        try:
            found = Range(float(low), float(high or low))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r}: give a number or a range such as 7-12") from error
        if not 0 < found.low <= found.high <= MOST:
            raise argparse.ArgumentTypeError(f"{text!r}: expected positive numbers, the lower one first")
        return found

    @property
    def ends(self) -> tuple[float, ...]:
        return (self.low,) if self.low == self.high else (self.low, self.high)

    def __str__(self) -> str:
        return "-".join(f"{end:g}" for end in self.ends)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", type=Path, help="of the model, and the disk to measure (default: 3.5-Super's shape)")
    parser.add_argument("--gpu", choices=sorted(CARDS), help="a card of the table; with --ram: a PC not here")
    parser.add_argument("--ram", type=amount, metavar="GIB", help="RAM as it is sold, instead of this machine's")
    parser.add_argument("--dram", type=Range.parse, metavar="GB/S", help="what reading RAM gives, such as 60-70")
    parser.add_argument("--disk", type=Range.parse, metavar="GB/S", help="random 3 MB reads, such as 7-12")
    parser.add_argument(
        "--cache", type=nothing_or_more, default=0.0, metavar="GB", help="expert slots (default: what fits)"
    )
    parser.add_argument("--redis", type=nothing_or_more, default=2.0, metavar="GB", help="for snapshots (default 2)")
    parser.add_argument(
        "--hot-states", type=nothing_or_more, default=1.0, metavar="GB", help="in the engine (default 1)"
    )
    parser.add_argument(
        "--desktop", type=nothing_or_more, default=4.0, metavar="GB", help="left for everything else (default 4)"
    )
    parser.add_argument("--no-monitoring", action="store_true", help="without Prometheus and Grafana")
    parser.add_argument("--wsl2", action="store_true", help="under WSL2, which page-locks at most half of its RAM")
    parser.add_argument("--sequences", type=whole, default=1, help="generated at once (default 1)")
    parser.add_argument("--context", type=whole, default=16384, metavar="TOKENS", help="of each (default 16384)")
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (default: here)")
    parser.add_argument("--record", type=Path, metavar="CSV", help="append plan.rtx5060_tok_s; needs --gpu rtx5060")


def run(args: argparse.Namespace) -> int:
    if args.record and args.gpu != "rtx5060":
        raise UsageError("--record writes plan.rtx5060_tok_s: give --gpu rtx5060")
    assumed = list(assume(args))
    store = Store.open(args.store) if args.store else None
    config = store.config if store else SUPER
    dense = vram.stored_layout(args.store) if args.store else dense_layout(SUPER)
    shape = shape_of(config, vram.dense_bytes(config, dense))
    corners = list(boxes(args, shape, config))
    wsl2 = args.wsl2 or (args.ram is None and "microsoft" in OSRELEASE.read_text().lower())
    wanted = RamWanted(args.cache, args.redis, args.hot_states, args.desktop, not args.no_monitoring, wsl2)
    ram = ram_ledger(config, shape.blocks, corners[0].ram_gb, wanted)
    for line in [*machine_lines(corners), *assumed]:
        print(line)
    theirs = published() if args.gpu == "rtx5060" else []
    for line in published_table(theirs):
        print(line)
    print(f"\nGraphics memory, {args.sequences} sequences of {args.context} tokens")
    budget_bytes = corners[0].card.vram_mib * vram.MIB
    locked_bytes = int((ram.cache_gb + args.hot_states) * GB)
    asked = vram.Wanted(args.sequences, args.context, locked_bytes=locked_bytes)
    asked = with_chunk(config, dense, asked, budget_bytes)
    asked = with_experts(config, dense, asked, shape.blocks, budget_bytes)
    card_gb = asked.kept_blocks * shape.block_bytes / GB
    print(vram.require(config, dense, asked, budget_bytes))
    print(f"\nRAM\n{ram}")
    print(f"\nSettings\n{settings(ram, args, card_gb)}")
    found = [ours(shape, corner, ram.cache_gb, card_gb) for corner in corners]
    there = f", {100 * found[0].on_card:.1f} % on the card" if card_gb else ""
    hits = 100 * found[0].hits
    print(f"\nA token, {hits:.1f} % of the experts found in memory{there} (a replay of made-up routing)")
    tokens = [(corner, one.token) for corner, one in zip(corners, found, strict=True)]
    for line in token_table(tokens):
        print(line)
    late = None if corners[0].measured else ours(shape, replace(corners[0], late_us=LATEST_US), ram.cache_gb, card_gb)
    for line in late_lines(corners[0], late):
        print(line)
    for line in draft_lines(shape, corners[0], found[0], block_bytes(config, dense), state_bytes(config)):
        print(line)
    share = ram.cache_gb * GB / (shape.blocks * shape.block_bytes)
    for line in first_token_table(shape, corners, share, asked.chunk_tokens, tokens[0][1]):
        print(line)
    print(f"\nWhat would help, from {tokens[0][1].tok_s:.1f} tok/s")
    for upgrade in upgrades(shape, corners[0], ram.cache_gb, card_gb):
        worth = upgrade.tok_s > WORTH * tokens[0][1].tok_s
        print(f"  {upgrade.tok_s:6.1f} tok/s  {upgrade.name}{'' if worth else ': no use'}")
    print("\nNot in it: heat, other work on the machine, a long context's attention, what a drive takes of RAM's rate.")
    if args.record:
        low, high = tokens[0][1].tok_s, tokens[-1][1].tok_s
        ends = " to ".join(f"RAM {c.dram_gb_s:g} and disk {c.disk_gb_s:g} GB/s" for c in (corners[0], corners[-1]))
        given = f"cache {ram.cache_gb:.1f} GB, {hits:.1f} % hits by replay, {ends}"
        for one in theirs:
            said = "-".join(sorted({f"{end:g}" for end in one.said}))
            figures.append(args.record, "plan.published_tok_s", one.tok_s, "tok/s", f"{one.what}: published {said}")
        note = f"predicted, not measured: low end; high end {high:.1f}; {given}"
        figures.append(args.record, "plan.rtx5060_tok_s", low, "tok/s", note)
        if late:
            note = f"predicted, not measured: low end, missing blocks {LATEST_US:g} us late; {given}"
            figures.append(args.record, "plan.rtx5060_late_tok_s", late.token.tok_s, "tok/s", note)
    return 0


def with_chunk(config: ModelConfig, dense: vram.Layout, asked: vram.Wanted, budget_bytes: int) -> vram.Wanted:
    """As much of a prompt at once as there is room for, long or short, as the engine chooses it."""
    tried = (
        replace(asked, chunk_tokens=chunk, joined=joined, drafts=joined or asked.sequences > 1)
        for chunk in CHUNKS
        for joined in (True, False)
    )
    fits = (wanted for wanted in tried if vram.ledger(config, dense, wanted).total_bytes <= budget_bytes)
    return next(fits, asked)


def with_experts(
    config: ModelConfig, dense: vram.Layout, asked: vram.Wanted, blocks: int, budget_bytes: int
) -> vram.Wanted:
    """What is left for the hottest experts, if it is worth it."""
    left_bytes = budget_bytes - vram.ledger(config, dense, asked).total_bytes - LEFT_BYTES
    kept = min(blocks, left_bytes // config.block.block_bytes)
    return replace(asked, kept_blocks=kept) if kept >= LEAST_KEPT * blocks else asked


def shape_of(config: ModelConfig, dense_bytes: int) -> Shape:
    return Shape(
        dense_bytes=dense_bytes,
        moe_layers=len(config.moe_layers),
        experts=config.experts,
        experts_per_token=config.experts_per_token,
        latent=config.latent_size,
        width=config.expert_width,
        block_bytes=config.block.block_bytes,
        mamba_layers=len(config.mamba_layers),
        attended=len(config.attention_layers) * config.attention_heads * config.head_dim,
    )


def assume(args: argparse.Namespace) -> Iterator[str]:
    """Of a PC that is not here, what was not said of it: this machine's memory and disk say nothing of another's."""
    if not (args.gpu and args.ram) or (args.dram and args.disk):
        return
    yield "  assumed, for a PC that is not here (to have this machine measured, leave out --gpu or --ram):"
    if not args.dram:
        args.dram = Range(*DDR5_GB_S)
        yield f"    RAM {args.dram} GB/s, two channels of DDR5; of DDR4: --dram 40"
    if not args.disk:
        args.disk = Range(*NVME_GB_S)
        yield f"    disk {args.disk} GB/s, an NVMe drive on PCIe 4.0 or 5.0; on PCIe 3.0: --disk 3.5"


def boxes(args: argparse.Namespace, shape: Shape, config: ModelConfig) -> Iterator[Box]:
    """The machine at both ends of every range, the slowest first."""
    here = measured(args, shape, config) if None in (args.gpu, args.ram, args.dram, args.disk) else None
    card = CARDS[args.gpu] if args.gpu else None
    drams = args.dram.ends if args.dram else (here.dram_gb_s if here else 0.0,)
    disks = args.disk.ends if args.disk else (here.disk_gb_s if here else 0.0,)
    ram_gb = args.ram * GIB_IN_GB if args.ram else here.ram_gb if here else 0.0
    for dram, disk in product(drams, disks):
        made = box(card, ram_gb, dram, disk) if card else here
        assert made is not None
        if here and card and not args.dram:  # this machine's processor with another card
            made = replace(made, measured=True, cpu_gb_s=here.cpu_gb_s, again=here.again)
        yield replace(made.with_rates(dram, disk), ram_gb=ram_gb)


def measured(args: argparse.Namespace, shape: Shape, config: ModelConfig) -> Box:
    """This machine. Raises PlanError if there is no card and none was named."""
    found = None if args.gpu else measure.card()
    if not args.gpu and found is None:
        raise PlanError(f"this machine has no CUDA card: name one with --gpu ({', '.join(sorted(CARDS))})")
    workers = Workers(default_threads())
    folder = args.store or args.folder
    if not folder.is_dir():
        raise PlanError(f"{folder}: there is no such folder; give one on the disk to measure, or --disk")
    if not os.access(folder, os.W_OK):
        print(f"{folder} cannot be written: the disk measured is that of {tempfile.gettempdir()}; or give --disk")
        folder = Path(tempfile.gettempdir())
    blocks, catalog, path = measure.synthetic(folder, config.block)
    try:
        disk, depth = (0.0, 0) if args.disk else measure.disk_gb_s(catalog)
        late_us = measure.late_us(workers, catalog, blocks, shape, depth) if depth else Rates.late_us
        cpu = measure.cpu_gb_s(workers, catalog, blocks, shape)
        again = measure.again(workers, catalog, blocks, shape)
    finally:
        path.unlink()
    dram = max(measure.dram_gb_s(workers), cpu)
    card, vram_gb_s, pcie_gb_s = found or (Card("none", 0, 0, (0, 0), 0), 1.0, 1.0)
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Box(card, ram_bytes / GB, vram_gb_s, pcie_gb_s, cpu, dram, disk, measured=True, late_us=late_us, again=again)


def machine_lines(corners: list[Box]) -> list[str]:
    first, last = corners[0], corners[-1]

    def span(name: str) -> str:
        low, high = getattr(first, name), getattr(last, name)
        return f"{low:.1f}" if low == high else f"{low:.1f} to {high:.1f}"

    return [
        f"{first.card.name}, {first.card.vram_mib} MiB; {first.ram_gb:.1f} GB of RAM; GB/s:",
        f"  graphics memory {span('vram_gb_s')}, PCIe {span('pcie_gb_s')}, RAM {span('dram_gb_s')}, "
        f"experts on the processor {span('cpu_gb_s')}, disk {span('disk_gb_s')}",
    ]


def settings(ram: RamLedger, args: argparse.Namespace, card_gb: float) -> str:
    return "\n".join(
        [
            f"  THIMBLE_ENGINE_EXPERT_CACHE_GB={ram.cache_gb:.1f}",
            "  THIMBLE_ENGINE_LOCK_MEMORY=true",
            f"  THIMBLE_ENGINE_HOT_STATES_GB={args.hot_states:g}",
            f"  THIMBLE_ENGINE_MAX_SEQUENCES={args.sequences}",
            f"  THIMBLE_ENGINE_CONTEXT_TOKENS={args.context}",
            *([f"  THIMBLE_ENGINE_VRAM_EXPERTS_GB={card_gb:.3g}"] if card_gb else []),
            f"  THIMBLE_REDIS_MEMORY={args.redis * 1000:.0f}mb",
        ]
    )


def published_table(found: list[Published]) -> Iterator[str]:
    """Whether the formula and the table's constants are right where somebody measured."""
    if found:
        yield "\nThe published engine on such a PC (RAM 65 GB/s, disk 12), tok/s published and by this formula"
    for one in found:
        said = "-".join(sorted({f"{end:g}" for end in one.said}))
        yield f"  {said:>8}{one.tok_s:8.1f}  {one.what}"


def token_table(tokens: list[tuple[Box, Token]]) -> Iterator[str]:
    """One line for each end of the ranges; all parts in milliseconds, their sum is the token."""
    names = ("dense", "hand-off", "experts", "disk, not hidden")
    yield "  RAM GB/s  disk GB/s" + "".join(f"{name:>18}" for name in names) + f"{'token ms':>11}{'tok/s':>8}"
    for machine, token in tokens:
        parts = (token.dense_ms, token.handoff_ms, token.experts_ms, token.disk_exposed_ms)
        yield (
            f"  {machine.dram_gb_s:8.1f}  {machine.disk_gb_s:9.1f}"
            + "".join(f"{part:18.2f}" for part in parts)
            + f"{token.total_ms:11.1f}{token.tok_s:8.1f}"
        )


def late_lines(slowest: Box, late: Ours | None) -> Iterator[str]:
    """What was not measured of a drive, and may be worse. `late`: with reads that are."""
    if late:
        yield (
            f"  a layer that misses waits {slowest.late_us:g} us beside its bytes (assumed: a drive's latency, the "
            f"last check);\n  were it {LATEST_US:g}, as measured on a virtual machine: {late.token.tok_s:.1f} tok/s"
        )


def draft_lines(shape: Shape, machine: Box, one: Ours, draft_bytes: int, fixed_bytes: int) -> Iterator[str]:
    """On the slowest of the machines, where a token without drafts is `one`. `fixed_bytes`: of a sequence's states."""
    own, copied = (two_tokens(shape, machine, one.hits, size, fixed_bytes) for size in (draft_bytes, 0))
    yield (
        f"\nTwo tokens in a step, if {100 * REPEATED:.0f} % of a layer's experts come again: {own.two_ms:.1f} ms, "
        f"a draft of the model's own {own.draft_ms:.1f} ms"
    )
    for accepted in ACCEPTED:
        gain = own.gain(accepted)
        yield f"  {100 * accepted:.0f} % of drafts right: {gain * one.token.tok_s:.1f} tok/s, {gain:.2f} times as fast"
    yield (
        f"  it pays from {100 * own.break_even:.0f} % on; copies of what was read, which cost nothing, from "
        f"{100 * copied.break_even:.0f} %"
    )


def first_token_table(shape: Shape, corners: list[Box], share: float, chunk: int, slowest: Token) -> Iterator[str]:
    """Seconds on the slowest of the machines with their parts, and on the fastest in all."""
    if not chunk:
        yield f"\nA first token: {slowest.total_ms:.0f} ms for each of a prompt: there is no room to read more at once"
        return
    yield f"\nA first token, seconds at the slowest and the fastest of these; {chunk} tokens of a prompt at once"
    names = ("chunks", "disk", "PCIe", "compute", "the longest", "dense", "in all", "fastest")
    yield "  tokens   " + "".join(f"{name:>12}" for name in names)
    for tokens in PROMPTS:
        slow, fast = (first_token(shape, corner, tokens, share, chunk) for corner in (corners[0], corners[-1]))
        parts = (slow.disk_s, slow.pcie_s, slow.compute_s, slow.experts_s, slow.dense_s, slow.total_s, fast.total_s)
        yield f"  {tokens:<9}{slow.chunks:12}" + "".join(f"{part:12.2f}" for part in parts)
