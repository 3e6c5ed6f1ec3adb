"""How long a token takes, from rates: the one formula behind `thimble simulate` and `thimble plan`.

A token goes through its MoE layers one after the other. A layer costs its share of the dense weights and a hand-off,
then the bytes of its experts, and the reads of those that are not in RAM. Owns the formula and the bytes of each
method; where rates come from (measured, or a table) and how often a block is missing (a replay) is the caller's
business. kernels/experts/host/replay.cpp runs the same formula layer by layer, with a disk that has a queue; a test
holds both together. Not in it: attention over a long context, heat, other work on the machine, reading a prompt.
"""

from dataclasses import dataclass
from enum import Enum

GB = 1_000_000_000
GROUP = 16  # neurons that share a row of scales of `down`


@dataclass(frozen=True)
class Shape:
    """What a token needs of a model. `dense_bytes`: all weights that a token reads but those of routed experts.
    `attended`: numbers of a query in all attention layers."""

    dense_bytes: int
    moe_layers: int
    experts: int
    experts_per_token: int
    latent: int
    width: int
    block_bytes: int
    alive: float = 0.075  # share of an expert's neurons that are not zero after ReLU^2
    mamba_layers: int = 0
    attended: int = 0

    @property
    def blocks(self) -> int:
        return self.moe_layers * self.experts

    @property
    def values_bytes(self) -> int:
        """Of one of the two matrices, without its scales."""
        return self.latent * self.width // 2

    @property
    def scales_bytes(self) -> int:
        return self.latent * self.width // GROUP

    @property
    def alive_groups(self) -> float:
        """Share of groups of 16 neurons with any alive, were zeros independent."""
        return 1 - (1 - self.alive) ** GROUP


SUPER = Shape(
    dense_bytes=int(6.6 * 2**30),
    moe_layers=40,
    experts=512,
    experts_per_token=22,
    latent=1024,
    width=2688,
    block_bytes=3_096_576,
    mamba_layers=40,
    attended=8 * 32 * 128,
)


class Method(Enum):
    """How a layer's experts are computed once their blocks are in RAM."""

    COPY = "copy"  # whole blocks over PCIe
    GROUPS = "groups"  # the published method: `up`, then the alive groups of `down`, over PCIe
    CPU = "cpu"  # where the bytes lie, by the processor: `up`, then alive rows of `down`
    SPLIT = "split"  # the same, divided between processor and PCIe

    def expert_bytes(self, shape: Shape) -> float:
        """Bytes of a block that move to whoever computes it."""
        up = shape.values_bytes + shape.scales_bytes
        match self:
            case Method.COPY:
                return 2 * up
            case Method.GROUPS:
                return up + shape.alive_groups * up
        return up + shape.alive * shape.values_bytes + shape.alive_groups * shape.scales_bytes


@dataclass(frozen=True)
class Rates:
    """Of a machine, in GB/s of 10^9 bytes.

    `cpu_gb_s`: expert bytes by the processor's kernels, which may be the limit, not the memory. `dram_gb_s`: the most
    that processor and PCIe get from RAM together. `handoff_us`: a layer's, there and back. `late_us`: of a block
    that is missing, beside its bytes at the disk's rate: until the first one comes, and until the last are checked.
    `again`: of the processor's time for an expert, what a second token of the same expert adds, where no memory is
    waited for: its sums are made anew, its codes are unpacked once.
    """

    vram_gb_s: float
    pcie_gb_s: float
    cpu_gb_s: float
    dram_gb_s: float
    disk_gb_s: float
    handoff_us: float = 20.0
    late_us: float = 150.0  # of a table: 100 of a drive, the rest checks 0.4 MB at 8 GB/s
    again: float = 0.5

    def expert_gb_s(self, method: Method) -> float:
        match method:
            case Method.CPU:
                return min(self.cpu_gb_s, self.dram_gb_s)
            case Method.SPLIT:
                return min(self.cpu_gb_s + self.pcie_gb_s, self.dram_gb_s)
        return min(self.pcie_gb_s, self.dram_gb_s)


@dataclass(frozen=True)
class Layer:
    """What a layer costs, in nanoseconds: once (dense weights, hand-off), for each expert, for each block read.

    `overlapped`: experts in RAM are computed while missing ones are read. Otherwise all reads come first. `late_ns`: of
    a layer that reads, beside its blocks at the disk's rate; it holds up no other read.
    """

    gap_ns: float
    expert_ns: float
    read_ns: float
    overlapped: bool
    late_ns: float = 0.0

    def time_ns(self, experts: float, reads: float) -> float:
        """Of a layer with that many experts, `reads` of them missing, on a disk that was idle."""
        if not self.overlapped:
            return self.gap_ns + reads * self.read_ns + self.late_ns * min(reads, 1.0) + experts * self.expert_ns
        # The last block to arrive is computed after it has arrived.
        last_ns = reads * self.read_ns + (self.late_ns + self.expert_ns) * min(reads, 1.0)
        return self.gap_ns + max(experts * self.expert_ns, last_ns)


def layer_of(shape: Shape, rates: Rates, method: Method) -> Layer:
    """The published methods hint at the next layer's experts, which hides that a block is late; ours are planned
    without. A late block of ours is computed by the processor alone."""
    dense_ns = shape.dense_bytes / shape.moe_layers / rates.vram_gb_s
    expert_ns = method.expert_bytes(shape) / rates.expert_gb_s(method)
    overlapped = method in (Method.CPU, Method.SPLIT)
    alone_ns = method.expert_bytes(shape) / rates.expert_gb_s(Method.CPU)
    return Layer(
        gap_ns=dense_ns + rates.handoff_us * 1e3,
        expert_ns=expert_ns,
        read_ns=shape.block_bytes / rates.disk_gb_s,
        overlapped=overlapped,
        late_ns=rates.late_us * 1e3 + alone_ns - expert_ns if overlapped else 0.0,
    )


@dataclass(frozen=True)
class Token:
    """The parts of a token's time, in milliseconds. `disk_exposed_ms` of `disk_ms` is not hidden behind anything."""

    dense_ms: float
    handoff_ms: float
    experts_ms: float
    disk_ms: float
    disk_exposed_ms: float

    @property
    def total_ms(self) -> float:
        return self.dense_ms + self.handoff_ms + self.experts_ms + self.disk_exposed_ms

    @property
    def tok_s(self) -> float:
        return 1e3 / self.total_ms


def token(
    shape: Shape,
    rates: Rates,
    method: Method,
    reads_per_token: float,
    *,
    hidden: float | None = None,
    ahead: float = 0.0,
) -> Token:
    """`reads_per_token` blocks are missing when the router names them, as many in every layer (a replay knows better:
    layers differ, and the slowest is waited for). `hidden` is the share of their time that costs nothing, where it was
    measured or replayed; None: what the formula says. `ahead`: share of the reads that a prefetch has done before."""
    layer = layer_of(shape, rates, method)
    reads = reads_per_token / shape.moe_layers
    experts_ns = shape.experts_per_token * layer.expert_ns
    exposed_ns = layer.time_ns(shape.experts_per_token, reads * (1 - ahead)) - layer.gap_ns - experts_ns
    if hidden is not None:
        exposed_ns = reads * layer.read_ns * (1 - hidden)
    layers_ms = shape.moe_layers / 1e6
    return Token(
        dense_ms=shape.dense_bytes / rates.vram_gb_s / 1e6,
        handoff_ms=shape.moe_layers * rates.handoff_us / 1e3,
        experts_ms=experts_ns * layers_ms,
        disk_ms=reads * layer.read_ns * layers_ms,
        disk_exposed_ms=exposed_ns * layers_ms,
    )
