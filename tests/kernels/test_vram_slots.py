"""Blocks that a GPU keeps in its own memory: which ones, and that they change no bit. Here plain memory stands for both
sides, and Triton's interpreter for the GPU; the host's side is the real one."""

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from expert_store import BlocksOnDisk, batch, write_blocks
from timing import in_time

from kernels.block import BlockLayout
from kernels.experts.decode_step import ExpertStep
from kernels.experts.device.turns import CACHE_LINE
from kernels.experts.device.vram_slots import CHANGED_EVERY, FILLED_AT_ONCE, VramSlots
from kernels.experts.host.binding import Host
from kernels.workers.pool import Workers, native

LAYERS, EXPERTS, TOP_K = 2, 10, 4
LAYOUT = BlockLayout(32, 16)
CPU = torch.device("cpu")
NAMED = 16  # heat of a use
SEEDS = (1, 2)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> BlocksOnDisk:
    return write_blocks(tmp_path_factory.mktemp("blocks"), LAYERS, EXPERTS, LAYOUT)


@pytest.fixture
def host(blocks: BlocksOnDisk) -> Iterator[Host]:
    opened = Host(blocks.catalog(), Workers(1), slots=12, readers=2, poison=True, prefetch="on")
    yield opened
    opened.check()
    opened.close()


class Played:
    """A GPU's side of the hand-off, one turn at a time."""

    def __init__(self, host: Host, rows: int, vram: VramSlots | None, share: int = 2, items: int = 0) -> None:
        self.host, self.rows, lookups = host, rows, rows * TOP_K
        self.step = ExpertStep(LAYOUT, items or lookups, rows, TOP_K, CPU, splits=1)
        self.flags = torch.zeros(4 * CACHE_LINE // 4, dtype=torch.int32).view(4, -1)
        self.ids = torch.zeros(2 * lookups + 1, dtype=torch.int32)
        self.plan = torch.zeros_like(self.step.plan)
        self.results = torch.zeros(lookups + 1, LAYOUT.latent)
        self.x, self.waited = torch.zeros(rows, LAYOUT.latent), torch.zeros(1, dtype=torch.int64)
        places = (*self.flags[:3], self.ids, self.x, self.plan, self.results, self.waited, self.flags[3])
        words = self.step.plan_words
        sizes = (rows, TOP_K, self.step.items, lookups, TOP_K, *words.starts, 1, self.step.items)
        self.lib = native()
        self.lib.thimble_turns_open.restype = ctypes.c_void_p
        self.handle = ctypes.c_void_p(
            self.lib.thimble_turns_open(
                ctypes.c_void_p(host.address),
                (ctypes.c_uint64 * len(places))(*(place.data_ptr() for place in places)),
                (ctypes.c_int32 * len(sizes))(*sizes),
            )
        )
        self.lib.thimble_turns_share(self.handle, ctypes.c_int(share), ctypes.c_double(0))
        if vram is not None:
            self.lib.thimble_turns_use(self.handle, vram.handle)

    def turn(self, layer: int, ids: torch.Tensor, x: torch.Tensor) -> None:
        """The host's part."""
        self.ids[: ids.numel()] = ids.flatten()
        self.ids[ids.numel() : -1] = ids.flatten()  # the next layer is guessed to name the same
        self.ids[-1] = layer
        self.x.copy_(x)
        self.flags[0, 0] += 1
        message = ctypes.create_string_buffer(500)
        assert self.lib.thimble_turns_serve(self.handle, 1, ctypes.c_int64(1_000_000), message, 500) == 1, message.value
        self.step.plan.copy_(self.plan)

    def run(self, layer: int, ids: torch.Tensor, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.turn(layer, ids, x)
        self.step.host_y = self.results
        self.step.x, self.step.weights = x, weights
        self.step.launch()
        self.retire()
        return self.step.out.clone()

    def retire(self) -> None:
        message = ctypes.create_string_buffer(500)
        assert self.lib.thimble_turns_retire(self.handle, message, 500) == 0, message.value

    def addresses(self) -> list[int]:
        return self.step.table[: int(self.step.count), 0].tolist()

    def close(self) -> None:
        self.lib.thimble_turns_close(self.handle)


def heat_up(host: Host, keys: list[int], uses: int) -> None:
    counts = host.heat()
    counts[keys] = uses * NAMED
    host.set_heat(counts)


def hold(host: Host, vram: VramSlots, keys: list[int]) -> None:
    """By way of RAM, a few at a time, as tokens would."""
    for key in keys:
        heat_up(host, [key], 100)
        ids = torch.tensor([[key % EXPERTS]], dtype=torch.int32)
        host.step(key // EXPERTS, ids, torch.ones(1, 1), torch.ones(1, LAYOUT.latent))
        vram.improve()
    assert sorted(vram.held().tolist()) == sorted(keys)


@pytest.mark.parametrize(("kept", "rows"), [([3, 4, 13, 15], 2), (list(range(20)), 1)], ids=["some", "all"])
def test_bits_are_those_without(host: Host, blocks: BlocksOnDisk, kept: list[int], rows: int) -> None:
    vram = VramSlots(host, 20, CPU)
    hold(host, vram, kept)
    played = Played(host, rows, vram)
    before, own = host.counters(), 0
    for seed in SEEDS:
        layer = seed % LAYERS
        given = batch(blocks, rows, TOP_K, seed)
        assert torch.equal(played.run(layer, *given), blocks.expected(layer, *given)), seed
        named = {layer * EXPERTS + id for id in given[0].flatten().tolist()}
        first, size = vram.memory.data_ptr(), vram.memory.numel()
        there = [first <= address < first + size for address in played.addresses()]
        assert there == sorted(there, reverse=True), "its own come first"
        assert sum(there) == len(named & set(kept))
        own += sum(there)
        host.check()
    after = host.counters()
    looked_up = after["hits"] + after["misses"] - before["hits"] - before["misses"]
    assert looked_up + own == sum(len(set(batch(blocks, rows, TOP_K, seed)[0].flatten().tolist())) for seed in SEEDS)
    played.close()
    vram.close()


def test_it_is_there_that_they_are_read(host: Host, blocks: BlocksOnDisk) -> None:
    vram, given = VramSlots(host, 20, CPU), batch(blocks, 1, TOP_K, 1)
    hold(host, vram, given[0][0].tolist())
    played = Played(host, 1, vram, share=0)
    assert torch.equal(played.run(0, *given), blocks.expected(0, *given))
    vram.memory.fill_(0)
    assert not torch.equal(played.run(0, *given), blocks.expected(0, *given))
    played.close()
    vram.close()


def test_more_than_a_step_has_room_for_are_looked_for_in_ram(host: Host, blocks: BlocksOnDisk) -> None:
    vram, given = VramSlots(host, 20, CPU), batch(blocks, 2, TOP_K, 2)
    hold(host, vram, list(range(10)))
    played = Played(host, 2, vram, items=3)
    assert torch.equal(played.run(0, *given), blocks.expected(0, *given))
    assert len(played.addresses()) == 3
    played.close()
    vram.close()


def test_what_is_held_is_not_read_ahead(host: Host, blocks: BlocksOnDisk) -> None:
    vram, given = VramSlots(host, 20, CPU), batch(blocks, 1, TOP_K, 3)
    ids = given[0][0].tolist()
    hold(host, vram, [*ids, *(EXPERTS + id for id in ids)])
    empty = Host(blocks.catalog(), Workers(1), slots=12, readers=2, prefetch="on")
    for reading, using in ((host, vram), (empty, None)):
        played = Played(reading, 1, using)
        before = reading.counters()["prefetch_issued"]

        def reads_ahead(reading: Host = reading, played: Played = played, before: int = before) -> bool:
            played.turn(0, given[0], given[2])
            played.retire()
            return reading.counters()["prefetch_issued"] > before

        if using is None:
            assert in_time(reads_ahead), "hints are taken up by readers, some time"
        else:
            assert not any(reads_ahead() for _ in range(200))
        played.close()
    empty.close()
    vram.close()


def test_the_hottest_are_kept_and_only_much_hotter_ones_take_their_place(host: Host, blocks: BlocksOnDisk) -> None:
    vram = VramSlots(host, 3, CPU)
    ids = torch.arange(8, dtype=torch.int32).view(1, -1)
    host.step(0, ids, torch.ones(1, 8), torch.ones(1, LAYOUT.latent))  # all of these are in RAM
    vram.improve()
    assert vram.held().tolist() == [], "named once is not hot"
    for key in range(8):
        heat_up(host, [key], 10 + key)
    heat_up(host, [15], 50)  # not in RAM
    vram.improve()
    assert vram.held().tolist() == [5, 6, 7]
    heat_up(host, [0], 30)  # not twice as hot as 5
    for _ in range(CHANGED_EVERY):
        vram.improve()
    assert vram.held().tolist() == [5, 6, 7]
    heat_up(host, [0], 31)
    for _ in range(CHANGED_EVERY):
        vram.improve()
    assert vram.held().tolist() == [6, 7, 0]
    assert vram.copied == 4
    packed = {bytes(blocks.packed[key].block.tobytes()) for key in (6, 7, 0)}
    assert {bytes(row.numpy().tobytes()) for row in vram.memory} == packed
    vram.close()


def test_bringing_a_block_is_no_use_of_it(host: Host) -> None:
    """In RAM it grows as old as it would have: it is the copy on the card that is used from now on."""
    for first in (0, 4):
        ids = torch.arange(first, first + 4, dtype=torch.int32).view(1, -1)
        host.step(0, ids, torch.ones(1, 4), torch.ones(1, LAYOUT.latent))
    before = host.resident().tolist()
    vram = VramSlots(host, 2, CPU)
    heat_up(host, before[:2], 20)
    vram.improve()
    assert sorted(vram.held().tolist()) == sorted(before[:2])
    assert host.resident().tolist() == before
    host.step(0, ids[:, :1], torch.ones(1, 1), torch.ones(1, LAYOUT.latent))
    assert host.resident().tolist() != before, "a use must show"
    vram.close()


def test_few_are_brought_at_once(host: Host) -> None:
    vram = VramSlots(host, 20, CPU)
    for layer in range(LAYERS):
        ids = torch.arange(EXPERTS, dtype=torch.int32).view(1, -1)
        host.step(layer, ids, torch.ones(1, EXPERTS), torch.ones(1, LAYOUT.latent))
    heat_up(host, list(range(20)), 5)
    vram.improve()
    assert len(vram.held()) == min(FILLED_AT_ONCE, host.counters()["slots_used"])
    vram.close()


def test_heat_counts_what_decode_names_and_halves(host: Host) -> None:
    def step(rows: int) -> None:
        ids = torch.tensor([[2, 5]], dtype=torch.int32).expand(rows, 2)
        host.step(0, ids, torch.ones(rows, 2), torch.ones(rows, LAYOUT.latent))

    step(3)
    step(9)  # a piece of a prompt
    assert host.heat()[[2, 5, 0]].tolist() == [NAMED, NAMED, 0]
    counts = np.arange(20, dtype=np.uint32) * 1000
    host.set_heat(counts)
    assert host.heat().tolist() == counts.tolist()
    for _ in range(1000 * LAYERS - 1):
        step(1)
    assert host.heat()[19] == 19_000 // 2
    assert 500 * NAMED < host.heat()[2] <= (2000 + 2000 * NAMED) // 2
    with pytest.raises(ValueError, match="model of 20 blocks"):
        host.set_heat(counts[:5])
