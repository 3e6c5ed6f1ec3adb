"""The routed experts of a sweep at the real model's shape on a GPU: checked against their definition, then timed.

Random weights and routing. Blocks rotate through a ring larger than a card's cache, so that every launch finds its
bytes in memory, as after a copy. A group's launches are replayed from a graph: what the GPU needs, not the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton

from kernels.block import BlockLayout
from kernels.experts import prefill, prefill_reference
from kernels.experts.prefill import Item, Items, Tiles
from kernels.experts.reference import Expert, unpack_expert
from services.tools import figures
from services.tools.bench_dense import timed
from services.tools.dense_cases import relative_error

NAME = "routed experts"
LAYOUT = BlockLayout(latent=1024, width=2688)
EXPERTS, TOP_K = 512, 22
SLOTS = 64  # 198 MB
ROWS = (1, 16, 88, 512)  # of an expert
GROUPS = (1, 8)  # experts in a launch
TOKENS = 2048
REPEATS = 24
BOUND = 2e-3  # most relative root mean square error: float16 rounds h and y
UP_SCALE, DOWN_SCALE = 1e-3, 2e-3

CANDIDATES = [
    Tiles(64, 64, 64),
    Tiles(64, 64, 64, warps=8),
    Tiles(64, 64, 64, stages=4),
    Tiles(64, 64, 128),
    Tiles(64, 128, 64),
    Tiles(64, 128, 64, warps=8),
    Tiles(64, 128, 128, warps=8),
    Tiles(128, 64, 64),
    Tiles(128, 64, 64, warps=8),
    Tiles(128, 128, 64, warps=8),
]


@dataclass(frozen=True)
class Sweep:
    """A ring of random blocks, expert e's in slot e % SLOTS, and one piece of a prompt whose lookups are `order`."""

    ring: torch.Tensor
    order: prefill.Order
    x: torch.Tensor
    h: torch.Tensor
    y: torch.Tensor
    up_scale: torch.Tensor
    down_scale: torch.Tensor
    items: Items

    @classmethod
    def of_equal_shares(cls, rows: int, experts: int, device: torch.device, ring: torch.Tensor) -> "Sweep":
        """Every one of `experts` experts has `rows` lookups, of tokens that are spread over the piece."""
        generator = torch.Generator(device).manual_seed(rows)
        ids = torch.arange(experts, device=device, dtype=torch.int32).repeat(rows)[:, None]
        ids = ids[torch.randperm(len(ids), generator=generator, device=device)]
        return cls(
            ring,
            prefill.order(ids, EXPERTS),
            torch.randn(len(ids), LAYOUT.latent, generator=generator, device=device).half(),
            torch.full((experts * rows, LAYOUT.width), torch.nan, device=device, dtype=torch.float16),
            torch.full((len(ids), LAYOUT.latent), torch.nan, device=device, dtype=torch.float16),
            torch.full((EXPERTS,), UP_SCALE, device=device),
            torch.full((EXPERTS,), DOWN_SCALE, device=device),
            Items(REPEATS, device),
        )

    def tables(self, rows: int, group: int, count: int) -> list[torch.Tensor]:
        """`count` groups of `group` experts, two in a row without a common block."""
        experts = len(self.h) // rows
        firsts = [turn % (experts // group) * group for turn in range(count)]
        return [
            self.items.put([Item(first + i, (first + i) % SLOTS, i * rows) for i in range(group)]) for first in firsts
        ]

    def up(self, table: torch.Tensor, rows: int, tiles: Tiles = prefill.UP) -> None:
        prefill.up(self.ring, LAYOUT, table, rows, self.order, self.x, self.up_scale, self.h, tiles)

    def down(self, table: torch.Tensor, rows: int, tiles: Tiles = prefill.DOWN) -> None:
        prefill.down(self.ring, LAYOUT, table, rows, self.order, self.h, self.down_scale, self.y, tiles)


def random_ring(device: torch.device) -> torch.Tensor:
    """Any codes; E4M3 scales from 1/2 to 2."""
    generator = torch.Generator(device).manual_seed(0)
    ring = torch.randint(0, 256, (SLOTS, LAYOUT.block_bytes), generator=generator, device=device, dtype=torch.uint8)
    for begin, end in ((LAYOUT.up_scales, LAYOUT.down_values), (LAYOUT.down_scales, LAYOUT.used_bytes)):
        ring[:, begin:end] = ring[:, begin:end] % 17 + 0x30
    return ring


def verify(ring: torch.Tensor, device: torch.device, tiles: tuple[Tiles, Tiles] = (prefill.UP, prefill.DOWN)) -> float:
    """The greater error of two experts' results. Raises AssertionError if groups or passes change a bit."""
    rows, experts = 88, 12
    sweep = Sweep.of_equal_shares(rows, experts, device, ring)

    def run(groups: list[list[int]], most: int) -> torch.Tensor:
        sweep.y.fill_(torch.nan)
        for first in range(0, rows, most):
            for group in groups:
                sweep.h.fill_(torch.nan)
                table = sweep.items.put([Item(id, id % SLOTS, i * most, first, most) for i, id in enumerate(group)])
                sweep.up(table, most, tiles[0])
                sweep.down(table, most, tiles[1])
        return sweep.y.clone()

    whole = run([list(range(8)), list(range(8, experts))], rows)
    assert torch.equal(run([[id] for id in reversed(range(experts))], rows), whole), "groups change bits"
    assert torch.equal(run([list(range(experts))], 29), whole), "passes change bits"
    errors = []
    for id in (0, experts - 1):
        unpacked = unpack_expert(np.asarray(ring[id % SLOTS].cpu()), LAYOUT, UP_SCALE, DOWN_SCALE)
        expert = Expert(unpacked.up.to(device), unpacked.down.to(device), UP_SCALE, DOWN_SCALE)
        lookups = sweep.order.rows[id * rows : (id + 1) * rows].long()
        expected = prefill_reference.down(prefill_reference.up(sweep.x[lookups], expert), expert)
        errors.append(relative_error(whole[lookups], expected))
    return max(errors)


def replayed(launches: list[Callable[[], None]]) -> float:
    """Seconds of one of them, from a graph of all."""
    for launch in launches[:2]:
        launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return timed(graph.replay) / len(launches)


def run(out: Path | None = None, candidates: bool = False) -> bool:
    """Prints, and appends to `out`; True if all was right. `candidates`: other tiles than the fixed ones, too."""
    device = torch.device("cuda")
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    ring = random_ring(device)
    error = verify(ring, device)
    print(f"{prefill.FINGERPRINT}, {versions}: error {error:.1e}, groups and passes equal")
    if not error < BOUND:
        return False

    def record(name: str, seconds: float, note: str) -> None:
        if out:
            figures.append(out, f"prefill_experts.{name}", seconds * 1e6, "us", f"random weights, {note}, {versions}")

    for rows in ROWS:
        sweep = Sweep.of_equal_shares(rows, max(GROUPS) * 8, device, ring)
        for group in GROUPS:
            tables = sweep.tables(rows, group, REPEATS)
            up = replayed([partial(sweep.up, table, rows) for table in tables])
            down = replayed([partial(sweep.down, table, rows) for table in tables])
            each = (up + down) / group
            print(
                f"{rows:4} rows, {group} experts: up {up * 1e6:7.1f} us, down {down * 1e6:7.1f} us, an expert "
                f"{each * 1e6:6.1f} us, {4 * rows * LAYOUT.latent * LAYOUT.width / each / 1e12:5.1f} TFLOP/s",
                flush=True,
            )
            record("expert_us", each, f"{rows} rows, {group} experts a launch")
    if candidates:
        try_candidates(ring, device)
    ids = torch.rand(TOKENS, EXPERTS, device=device).topk(TOP_K).indices.int()
    seconds = timed(partial(prefill.order, ids, EXPERTS))
    print(f"order of {TOKENS} tokens: {seconds * 1e6:.0f} us")
    record("order_us", seconds, f"{TOKENS} tokens")
    y = torch.randn(TOKENS * TOP_K, LAYOUT.latent, device=device).half()
    weights, result = torch.rand(TOKENS, TOP_K, device=device), torch.empty(TOKENS, LAYOUT.latent, device=device)
    prefill.combine(y, weights, result)
    if not torch.equal(result, prefill_reference.combine(y, weights)):
        print("combine is WRONG")
        return False
    seconds = replayed([partial(prefill.combine, y, weights, result)] * 4)
    print(f"combine of {TOKENS} tokens: {seconds * 1e6:.0f} us, {y.nbytes / seconds / 1e9:.0f} GB/s")
    record("combine_us", seconds, f"{TOKENS} tokens")
    return True


def try_candidates(ring: torch.Tensor, device: torch.device) -> None:
    """What other tiles would take for a group of 8 experts."""
    for name in ("up", "down"):
        for tiles in CANDIDATES:
            try:
                error = verify(ring, device, (tiles, prefill.DOWN) if name == "up" else (prefill.UP, tiles))
            except triton.runtime.errors.OutOfResources as trouble:
                print(f"{name} {tiles}: {trouble}")
                continue
            times = []
            for rows in ROWS:
                sweep = Sweep.of_equal_shares(rows, 64, device, ring)
                tables = sweep.tables(rows, 8, REPEATS)
                launch = sweep.up if name == "up" else sweep.down
                times.append(replayed([partial(launch, table, rows, tiles) for table in tables]))
            print(
                f"{name} {tiles}: " + ", ".join(f"{t * 1e6:.1f}" for t in times) + f" us, error {error:.1e}", flush=True
            )
