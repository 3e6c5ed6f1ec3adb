"""python ring_under_late_driver.py ROUNDS FORGOTTEN: sweeps through a ring whose copies and readers run late, in any
order that streams and events allow (late_driver.cpp, which must be found as libcuda.so.1). Prints how many lookups were
read, and how many blocks wrongly. Of FORGOTTEN waits for events one is forgotten; 0: none."""

import ctypes
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from expert_store import BlocksOnDisk, write_blocks
from feeding import EXPERTS, LAYERS, TOKENS

from kernels.experts.device import ring as device_ring
from kernels.experts.device.ring import Ring
from kernels.experts.host.binding import Host
from kernels.experts.host.feed import Feed
from kernels.workers.pool import Workers

GROUPS, GROUP, MOST_ROWS = 3, 4, 100
KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_int64)


class Round:
    """A few layers, some guessed, some given up; slots are few, and what is evicted is poisoned."""

    def __init__(self, blocks: BlocksOnDisk, late: ctypes.CDLL) -> None:
        self.blocks, self.late = blocks, late
        self.host = Host(
            blocks.catalog(), Workers(1, spin_us=0), slots=random.choice([2, 5, 20]), readers=2, poison=True
        )
        self.places = torch.full((GROUPS * GROUP, blocks.layout.block_bytes), 0xFF, dtype=torch.uint8)
        self.ring, self.feed = Ring(self.host, self.places, GROUPS, MOST_ROWS), Feed(self.host)
        memory = self.places.data_ptr(), self.ring._here.data_ptr(), self.ring.tables.data_ptr()
        handle = device_ring._library().thimble_ring_open(
            self.host.address, 1, None, (ctypes.c_uint64 * 3)(*memory), GROUPS, GROUP, MOST_ROWS, *self.ring._text()
        )
        assert handle, self.ring._message.value
        self.ring._handle = ctypes.c_void_p(handle)  # as for a GPU's memory
        self.passes: list[tuple[int, int, int]] = []  # layer, first, items
        self.read = self.wrong = 0
        self.seen: dict[tuple[int, int], int] = {}
        self.kernel = KERNEL(self._compute)

    def _compute(self, number: int) -> None:
        layer, first, items = self.passes[number]
        for expert, place, _, _, lookups in self.ring.tables[first : first + items].tolist():
            self.read += lookups
            expected = self.blocks.packed[layer * EXPERTS + expert].block.tobytes()
            self.wrong += self.places[place].numpy().tobytes()[: len(expected)] != expected
            self.seen[layer, expert] = self.seen.get((layer, expert), 0) + lookups

    def layer(self, layer: int, counts: np.ndarray, guessed: bool, groups: int) -> None:
        if guessed:
            self.feed.guess(layer)
            self.ring.ahead()
        self.feed.begin(layer, counts, TOKENS)
        while groups and (group := self.ring.next(counts, 0)) is not None:
            for first, items, _ in group.passes:
                self.passes.append((layer, first, items))
                self.late.late_launch(None, self.kernel, ctypes.c_int64(len(self.passes) - 1))
            self.ring.used(0)
            groups -= 1
        self.ring.drain()
        self.feed.end()

    def run(self) -> None:
        expected: dict[tuple[int, int], int] = {}
        for _ in range(5):
            layer, counts = random.randrange(LAYERS), np.zeros(EXPERTS, np.int32)
            for expert in random.sample(range(EXPERTS), random.choice([0, 1, 9, EXPERTS])):
                counts[expert] = random.randrange(1, 100)
                expected[layer, expert] = expected.get((layer, expert), 0) + int(counts[expert])
            self.layer(layer, counts, random.random() < 0.6, groups=-1)
        self.late.cuStreamSynchronize(None)
        self.wrong += self.seen != expected
        self.layer(0, np.ones(EXPERTS, np.int32), True, groups=random.choice([0, 1]))  # given up
        self.late.cuStreamSynchronize(None)
        self.host.check()
        self.host.close()


def main(rounds: int, forgotten: int) -> None:
    late = ctypes.CDLL("libcuda.so.1")
    read = wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        blocks = write_blocks(Path(folder), LAYERS, EXPERTS)
        for seed in range(rounds):
            random.seed(seed)
            late.late_begin(seed, forgotten)
            one = Round(blocks, late)
            one.run()
            read, wrong = read + one.read, wrong + one.wrong
    print(read, wrong)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
