"""What a machine will do with a model, before anyone buys it: tokens a second, time to a first token, what would help.

Owns the assumptions that predict.py leaves to its caller: how often a block is missing, how unevenly the missing ones
fall on the layers, how a prompt is read. Ours is a replay through the engine's own cache, with what it reads ahead; the
published methods, and models of another shape than the routing is made up for, are the formula. Not in it: heat, other
work on the machine, what a drive's writes take of the RAM's bandwidth.
"""

import functools
from dataclasses import dataclass, replace
from math import comb

import numpy as np

from kernels.experts.host.replay import Clock, Routing
from services.engine.gpu.ledger import sweep_part
from services.tools.hardware import CARDS, PCIE_GB_S, Box, box
from services.tools.predict import GB, SUPER, Layer, Method, Shape, Token, layer_of, token
from services.tools.traces.generators import generate
from services.tools.traces.kept import without_hottest
from services.tools.traces.steady import steady

# Share of all experts in RAM, and hits under plain LRU: `thimble simulate calibrated --policy lru --prefetch off`, 1000
# tokens of the generator that is held to what was published of the real model (81-84 % at 24 %).
HITS = (
    (0.0, 0.0),
    (0.06, 0.398),
    (0.12, 0.622),
    (0.18, 0.753),
    (0.24, 0.826),
    (0.315, 0.880),
    (0.4, 0.916),
    (0.5, 0.941),
    (0.65, 0.964),
    (1.0, 1.0),
)
TOKENS, WARM_TOKENS = 600, 200  # of the routing that is replayed; the first fill the cache
SWEEP_COMPUTE_SHARE = 0.4  # of the maker's TFLOPS that reading a prompt reaches
# Of a token in one Mamba layer, whose recurrence goes token by token, so that latency counts and not a card's size:
# scan.sequential_us and scan.convolve_us of 2048 tokens in tests/bench/results/h200-x2-32core.csv.
SCAN_S = 0.95e-6


def hit_rate(share: float) -> float:
    """Of a cache with room for `share` of all experts: between the points of HITS. Another dialog has another: replay
    its trace with `thimble simulate`."""
    shares, hits = zip(*HITS, strict=True)
    return float(np.interp(share, shares, hits))


def decode(shape: Shape, pc: Box, method: Method, hits: float) -> Token:
    """A token's time. Missing blocks fall on the layers as independent draws do: a layer waits for its own, so that
    uneven ones cost more than the mean."""
    layer = layer_of(shape, pc.rates, method)
    reads = shape.experts_per_token * (1 - hits)
    hidden = 1 - exposed_ns(layer, shape.experts_per_token, hits) / (reads * layer.read_ns) if reads else 1.0
    return token(shape, pc.rates, method, reads * shape.moe_layers, hidden=hidden)


@dataclass(frozen=True)
class Published:
    """What the published engine's author measured, and what the formula makes of it."""

    what: str
    said: tuple[float, float]
    tok_s: float

    @property
    def error(self) -> float:
        """Beyond the nearer end of what was said, in shares of it."""
        low, high = self.said
        return max(0.0, 1 - self.tok_s / low, self.tok_s / high - 1)


def published(shape: Shape = SUPER) -> list[Published]:
    """One set of constants for all: an RTX 5060 in a PC with a fast drive, all reads before computing, plain LRU."""
    pc = box(CARDS["rtx5060"], 34.4, dram_gb_s=65, disk_gb_s=12)
    cache_share = 20 * GB / (shape.blocks * shape.block_bytes)
    tried = (
        ("whole blocks copied, 24 % of the experts in RAM", Method.COPY, 0.24, (6.6, 6.6)),
        ("alive groups of 16, 24 % in RAM", Method.GROUPS, 0.24, (7.3, 7.6)),
        ("alive groups of 16, 20 GB in RAM", Method.GROUPS, cache_share, (8.2, 8.2)),
    )
    return [
        Published(what, said, decode(shape, pc, method, hit_rate(share)).tok_s) for what, method, share, said in tried
    ]


@dataclass(frozen=True)
class Ours:
    """A token of the engine. `hits`: found in RAM or in the card's memory, by then; `on_card` of all were there."""

    token: Token
    hits: float
    on_card: float


@functools.cache
def made_up() -> Routing:
    return generate("calibrated", TOKENS)


def ours(shape: Shape, pc: Box, cache_gb: float, card_gb: float = 0.0) -> Ours:
    """With so much RAM, and so much of the card's memory, for experts. Those on the card are the hottest of the first
    tokens, computed there from its memory while nobody else computes, which is more than they cost."""
    routing = made_up()
    if (routing.layers, routing.experts, routing.ids.shape[1]) != (
        shape.moe_layers, shape.experts, shape.experts_per_token
    ):  # fmt: skip
        hits = hit_rate(cache_gb * GB / (shape.blocks * shape.block_bytes))
        return Ours(decode(shape, pc, Method.SPLIT, hits), hits, 0.0)
    layer = layer_of(shape, pc.rates, Method.SPLIT)
    clock = Clock(layer.gap_ns, layer.expert_ns, layer.read_ns, layer.overlapped, "auto", late_ns=layer.late_ns)
    slots = max(shape.experts_per_token, min(shape.blocks, int(cache_gb * GB / shape.block_bytes)))
    kept = int(card_gb * GB / shape.block_bytes)
    found = steady(without_hottest(routing, kept, WARM_TOKENS) if kept else routing, WARM_TOKENS, slots, clock)
    named = shape.moe_layers * shape.experts_per_token
    on_card = named - found.lookups
    made = Token(
        dense_ms=shape.dense_bytes / pc.vram_gb_s / 1e6,
        handoff_ms=shape.moe_layers * pc.rates.handoff_us / 1e3,
        experts_ms=found.lookups * layer.expert_ns / 1e6
        + on_card * Method.SPLIT.expert_bytes(shape) / pc.vram_gb_s / 1e6,
        disk_ms=(found.lookups - found.hits) * layer.read_ns / 1e6,
        disk_exposed_ms=found.waited_ms,
    )
    return Ours(made, (found.hits + on_card) / named, on_card / named)


def exposed_ns(layer: Layer, experts: int, hits: float) -> float:
    """Of a layer's reads, what nothing hides, over all numbers of misses that may come."""
    busy_ns, miss = layer.gap_ns + experts * layer.expert_ns, 1 - hits
    return sum(
        comb(experts, reads) * miss**reads * hits ** (experts - reads) * (layer.time_ns(experts, reads) - busy_ns)
        for reads in range(experts + 1)
    )


@dataclass(frozen=True)
class FirstToken:
    """Of a prompt, in seconds, summed over its chunks. Disk, PCIe and the experts' computing are done at the same time
    where `overlapped`, so that the slowest of a chunk counts: `experts_s`; else one after the other. `dense_s` is all
    the rest, which is done between the layers' experts."""

    tokens: int
    chunks: int
    disk_s: float
    pcie_s: float
    compute_s: float
    experts_s: float
    dense_s: float

    @property
    def total_s(self) -> float:
        return self.experts_s + self.dense_s


def first_token(shape: Shape, pc: Box, tokens: int, share: float, chunk: int = 2048, ours: bool = True) -> FirstToken:
    """Reading a prompt touches nearly every expert: what is not in RAM is read once a chunk, and each is carried to the
    card. Tokens that name experts independently of each other touch the most; real ones touch fewer. Computing is at
    SWEEP_COMPUTE_SHARE of the card's rate, dense weights are read for sweep_part(chunk) tokens at once."""
    flops_s = pc.card.tflops * 1e12 * SWEEP_COMPUTE_SHARE
    looked_up = 2 * shape.moe_layers * shape.experts_per_token * shape.latent * shape.width * 2
    disk_s = pcie_s = compute_s = experts_s = dense_s = 0.0
    for begin in range(0, tokens, chunk):
        count = min(chunk, tokens - begin)
        touched = shape.blocks * (1 - (1 - shape.experts_per_token / shape.experts) ** count)
        parts = (
            touched * shape.block_bytes * (1 - share) / pc.disk_gb_s / GB,
            touched * shape.block_bytes / pc.pcie_gb_s / GB,
            looked_up * count / flops_s,
        )
        disk_s, pcie_s, compute_s = disk_s + parts[0], pcie_s + parts[1], compute_s + parts[2]
        experts_s += max(parts) if ours else sum(parts)
        weights_s = max(
            -(-count // sweep_part(chunk)) * shape.dense_bytes / pc.vram_gb_s / GB,
            2 * shape.dense_bytes * count / flops_s,
        )
        attention_s = 4 * shape.attended * count * (begin + count / 2) / flops_s
        dense_s += weights_s + attention_s + count * shape.mamba_layers * SCAN_S
    return FirstToken(tokens, -(-tokens // chunk), disk_s, pcie_s, compute_s, experts_s, dense_s)


@dataclass(frozen=True)
class Upgrade:
    name: str
    tok_s: float


def upgrades(shape: Shape, pc: Box, cache_gb: float, card_gb: float = 0.0) -> list[Upgrade]:
    """What one change would give, the best first."""

    def after(name: str, changed: Box, cache: float = cache_gb, card: float = card_gb) -> Upgrade:
        return Upgrade(name, ours(shape, changed, cache, card).token.tok_s)

    found = [
        after(f"as much RAM again, {pc.ram_gb:.0f} GB of the same speed", pc, cache_gb + pc.ram_gb),
        after("a second drive like the first (thimble spread)", pc.with_rates(pc.dram_gb_s, 2 * pc.disk_gb_s)),
        after("RAM a quarter faster", pc.with_rates(1.25 * pc.dram_gb_s, pc.disk_gb_s)),
        after("a card with twice the memory bandwidth", replace(pc, vram_gb_s=2 * pc.vram_gb_s)),
        after("the same card with 8 GB more, for experts", pc, card=card_gb + 8),
    ]
    wider_gb_s = PCIE_GB_S.get((pc.card.pcie[0], 16), 0.0)  # of a measured card it is not known
    if wider_gb_s > pc.pcie_gb_s:
        found.append(after("a card with 16 PCIe lanes", replace(pc, pcie_gb_s=wider_gb_s)))
    return sorted(found, key=lambda upgrade: -upgrade.tok_s)
