"""What a machine is for a plan: its sizes and rates, from a small table of known parts or measured. Owns the table.

Where a rate is a measurement of somebody's, the comment says whose; the rest are the makers' figures, which nothing
reaches: what a kernel gets of them is stated beside them.
"""

from dataclasses import dataclass, replace

from services.tools.predict import Rates

PCIE_GB_S = {  # what copies into a card reach, by generation and lanes
    (3, 8): 6.5,
    (3, 16): 12.5,
    (4, 8): 13.5,
    (4, 16): 26.0,
    (5, 8): 28.0,  # the published engine's RTX 5060
    (5, 16): 55.0,  # tests/bench/results/h200-16core.csv, by the copy engine
}
# Of a PC of which no more is said than its card and its RAM's size. Two channels of DDR5-4800 to 5600 have 77 to 90
# GB/s by the standard, of which plain reading gives about 78 %; DDR4-3200 has 51. Drives: what makers say of PCIe 4.0
# and 5.0.
DDR5_GB_S, NVME_GB_S = (60.0, 70.0), (7.0, 12.0)
VRAM_SHARE = 0.85  # of a card's peak bandwidth that the dense kernels are planned with
# Of what reading RAM gives, that the expert kernels reach with enough cores. 0.65 was seen with 16 slow ones and no
# huge pages; beside a link that takes the rest it makes no difference.
CPU_SHARE = 0.80
# A split step over the time that both sides need to read its bytes: 1.27 in h200-16core.csv, of which the hand-off,
# which is counted by itself, is 0.06.
STEP_OVER_READING = 1.21
MIB = 1 << 20


@dataclass(frozen=True)
class Card:
    """`vram_gb_s`: the maker's. `tflops`: dense BF16 with float32 sums, the maker's."""

    name: str
    vram_mib: int
    vram_gb_s: float
    pcie: tuple[int, int]
    tflops: float


# Makers' product pages and architecture papers: memory, bandwidth, link; tensor TFLOPS are theirs without sparsity.
CARDS = {
    "rtx3060": Card("RTX 3060 12 GB", 12288, 360, (4, 16), 25),
    "rtx3060ti": Card("RTX 3060 Ti", 8192, 448, (4, 16), 32),
    "rtx3070": Card("RTX 3070", 8192, 448, (4, 16), 41),
    "rtx3080": Card("RTX 3080 10 GB", 10240, 760, (4, 16), 60),
    "rtx3090": Card("RTX 3090", 24576, 936, (4, 16), 71),
    "rtx4060": Card("RTX 4060", 8188, 272, (4, 8), 30),
    "rtx4060ti": Card("RTX 4060 Ti 8 GB", 8188, 288, (4, 8), 44),
    "rtx4070": Card("RTX 4070", 12282, 504, (4, 16), 58),
    "rtx4090": Card("RTX 4090", 24564, 1008, (4, 16), 165),
    "rtx5060": Card("RTX 5060", 8151, 448, (5, 8), 38),  # MiB as its driver reports them, from the published write-up
    "rtx5060ti": Card("RTX 5060 Ti 8 GB", 8151, 448, (5, 8), 47),
    "rtx5060ti16": Card("RTX 5060 Ti 16 GB", 16311, 448, (5, 8), 47),
    "rtx5070": Card("RTX 5070", 12227, 672, (5, 16), 62),
    "rtx5070ti": Card("RTX 5070 Ti", 16303, 896, (5, 16), 88),
    "rtx5080": Card("RTX 5080", 16303, 960, (5, 16), 113),
    "rtx5090": Card("RTX 5090", 32607, 1792, (5, 16), 210),
}


@dataclass(frozen=True)
class Box:
    """A machine. GB are 10^9 bytes. `cpu_gb_s`: expert bytes by the processor's kernels. `late_us` and `again`:
    predict.py's Rates. `measured`: it was, here."""

    card: Card
    ram_gb: float
    vram_gb_s: float
    pcie_gb_s: float
    cpu_gb_s: float
    dram_gb_s: float
    disk_gb_s: float
    measured: bool = False
    late_us: float = Rates.late_us
    again: float = Rates.again

    @property
    def rates(self) -> Rates:
        """As the formula takes them: a step of experts does not get all that reading gets of RAM."""
        dram_gb_s = self.dram_gb_s / STEP_OVER_READING
        return Rates(
            self.vram_gb_s, self.pcie_gb_s, self.cpu_gb_s, dram_gb_s, self.disk_gb_s, late_us=self.late_us,
            again=self.again,
        )  # fmt: skip

    def with_rates(self, dram_gb_s: float, disk_gb_s: float) -> "Box":
        """The same box with another memory and disk. A faster memory is of use as far as the processor keeps up."""
        cpu_gb_s = self.cpu_gb_s if self.measured else CPU_SHARE * dram_gb_s
        return replace(self, dram_gb_s=dram_gb_s, disk_gb_s=disk_gb_s, cpu_gb_s=cpu_gb_s)


def box(card: Card, ram_gb: float, dram_gb_s: float, disk_gb_s: float) -> Box:
    """From the table: the link and the memory of `card`, a processor that reads experts nearly as fast as memory is."""
    vram_gb_s, pcie_gb_s = VRAM_SHARE * card.vram_gb_s, PCIE_GB_S[card.pcie]
    return Box(card, ram_gb, vram_gb_s, pcie_gb_s, CPU_SHARE * dram_gb_s, dram_gb_s, disk_gb_s)
