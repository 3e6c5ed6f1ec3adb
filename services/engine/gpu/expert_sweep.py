"""One MoE layer's routed experts for many tokens: blocks from the host library's slots through a ring on the card.

Owns the ring, the stream of copies and what orders the two: a place of the ring is written after the products that read
it, read after the copy into it, and a slot's lease is given back after the copy out of it. While one group of blocks is
used the next ones are on their way. Which blocks come in which order is the host library's feed's.
"""

import ctypes
from collections.abc import Generator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.experts import prefill
from kernels.experts.host.binding import Host
from kernels.experts.host.feed import Block, Feed
from services.engine.gpu.ledger import RING_GROUPS, ring_group
from services.engine.gpu.ranges import named as named_range
from services.engine.gpu.room import Room

EXPECTED_LOOKUPS = 4  # an expert; with more it is all but sure that a sweep's next layer needs it, too


class ExpertSweep:
    """For at most `tokens` tokens, in `room`; `host`'s slots must be page-locked if that is on a GPU."""

    def __init__(self, host: Host, top_k: int, tokens: int, room: Room) -> None:
        catalog, device = host.catalog, room.memory.device
        self.room, self.layout, self.device, self.experts = room, catalog.layout, device, catalog.offsets.shape[1]
        self.feed = Feed(host)
        self.layers = len(catalog.offsets)
        block = self.layout.block_bytes
        self.group = ring_group(tokens)
        self.ring = room.take(RING_GROUPS * self.group, block, dtype=torch.uint8)
        self.h = room.take(tokens, self.layout.width, dtype=torch.float16)
        self.y = room.take(tokens * top_k, self.layout.latent, dtype=torch.float16)
        self.up_scales = torch.from_numpy(catalog.up_scales).to(device)
        self.down_scales = torch.from_numpy(catalog.down_scales).to(device)
        self.items = prefill.Items(2 * RING_GROUPS, device)
        self.counts = torch.zeros(self.experts, dtype=torch.int32, pin_memory=device.type == "cuda")
        start, size_bytes = host.memory()
        self.start, self.slots = start, _bytes_at(start, size_bytes).view(-1, block)
        self.copied_bytes = self.named_blocks = 0  # since the start; a block counts once in each call that names it
        on_gpu = device.type == "cuda"
        self.copies: Any = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        events = RING_GROUPS if on_gpu else 0
        self.used = [torch.cuda.Event() for _ in range(events)]  # type: ignore[no-untyped-call]
        self.copied = [torch.cuda.Event() for _ in range(events)]  # type: ignore[no-untyped-call]
        self.leased: list[list[int]] = [[] for _ in range(RING_GROUPS)]  # of each group of the ring

    def run(self, layer: int, ids: Tensor, weights: Tensor, x: Tensor, out: Tensor) -> Generator[float, None, None]:
        """ids int32 and weights float32 [T, top_k], x float16 [T, latent] -> out float32 [T, latent], queued on the
        current stream. Yields the share that is done wherever others may run. Raises BlockError."""
        order = prefill.order(ids, self.experts)
        self.counts.copy_(order.starts.diff(), non_blocking=True)
        self._synchronize()
        counts = self.counts.numpy().copy()
        named, done = int(np.count_nonzero(counts)), 0
        self.named_blocks += named
        self.feed.begin(layer, counts, len(ids))
        if layer + 1 < self.layers and ids.numel() >= EXPECTED_LOOKUPS * self.experts:
            self.feed.expect(layer + 1, np.arange(self.experts, dtype=np.int32))
        group = 0
        try:
            while (blocks := self._take(group)) is not None:
                with named_range("sweep: a group's experts, MoE layer", layer):
                    self._copy(group, blocks)
                    self._compute(group, blocks, counts, order, layer, x)
                group = (group + 1) % RING_GROUPS
                done += len(blocks)
                if done < named:
                    yield done / named
        finally:
            self._let_go()
        prefill.combine(self.y[: ids.numel()], weights, out)

    def _take(self, group: int) -> list[Block] | None:
        """The next blocks for a group of the ring, whose last ones have left it."""
        self._release(group)
        while True:
            blocks = self.feed.take(self.group)
            if blocks is None or blocks:
                return blocks
            oldest = next(each for each in self._from(group) if self.leased[each])
            self._release(oldest)

    def _from(self, group: int) -> list[int]:
        return [(group + later) % RING_GROUPS for later in range(RING_GROUPS)]

    def _release(self, group: int) -> None:
        if self.leased[group]:
            if self.copied:
                self.copied[group].synchronize()
            self.feed.release(*self.leased[group])
            self.leased[group] = []

    def _let_go(self) -> None:
        for group in range(RING_GROUPS):
            self._release(group)
        self.feed.end()

    def _copy(self, group: int, blocks: list[Block]) -> None:
        if self.copies is not None:
            self.copies.wait_event(self.used[group])
        with torch.cuda.stream(self.copies) if self.copies is not None else nullcontext():
            for place, block in enumerate(blocks, group * self.group):
                slot = (block.address - self.start) // self.layout.block_bytes
                self.ring[place].copy_(self.slots[slot], non_blocking=True)
        self.leased[group] = [block.number for block in blocks]
        self.copied_bytes += len(blocks) * self.layout.block_bytes
        if self.copies is not None:
            self.copied[group].record(self.copies)
            torch.cuda.current_stream().wait_event(self.copied[group])

    def _compute(
        self, group: int, blocks: list[Block], counts: np.ndarray[Any, Any], order: prefill.Order, layer: int, x: Tensor
    ) -> None:
        named = [(block.expert, group * self.group + i, int(counts[block.expert])) for i, block in enumerate(blocks)]
        for items, most in passes(named, len(self.h)):
            table = self.items.put(items)
            prefill.up(self.ring, self.layout, table, most, order, x, self.up_scales[layer], self.h)
            prefill.down(
                self.ring, self.layout, table, most, order, self.h, self.down_scales[layer], self.y[: len(order.rows)]
            )
        if self.used:
            self.used[group].record()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def passes(named: list[tuple[int, int, int]], most_rows: int) -> list[tuple[list[prefill.Item], int]]:
    """(expert, place in the ring, lookups) of a group -> launches of at most `most_rows` rows in all: their items, and
    the most rows of one of them."""
    made: list[tuple[list[prefill.Item], int]] = []
    items: list[prefill.Item] = []
    rows = largest = 0
    for expert, place, count in named:
        first = 0
        while first < count:
            taken = min(count - first, most_rows - rows)
            items.append(prefill.Item(expert, place, rows, first, taken))
            rows, first, largest = rows + taken, first + taken, max(largest, taken)
            if rows == most_rows:
                made.append((items, largest))
                items, rows, largest = [], 0, 0
    return [*made, (items, largest)] if items else made


def _bytes_at(address: int, size_bytes: int) -> Tensor:
    """The host library's memory, which outlives this."""
    return torch.frombuffer((ctypes.c_uint8 * size_bytes).from_address(address), dtype=torch.uint8)
