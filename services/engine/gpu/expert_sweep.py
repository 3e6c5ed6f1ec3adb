"""One MoE layer's routed experts for many tokens: blocks from the host library's slots through a ring on the card.

Owns the ring's memory and the order of work; which blocks come in which order is the host library's feed's, and how
they get into the ring, and what orders copies, products and slots, its Ring's. While one group of blocks is used the
next ones are on their way; for a long piece as many as the ring holds are so before the router has named any.
"""

from collections.abc import Generator

import numpy as np
import torch
from torch import Tensor

from kernels.experts import prefill
from kernels.experts.device.ring import Group, Ring
from kernels.experts.host.binding import Host
from kernels.experts.host.feed import Feed
from kernels.experts.prefill_launches import Products
from services.engine.gpu.ledger import RING_GROUPS, products_bytes, ring_group
from services.engine.gpu.ranges import named as named_range
from services.engine.gpu.room import Room

# Of a sweep's lookups, for each of a layer's experts:
EXPECTED_LOOKUPS = 4  # with more it is all but sure that the next layer's are needed too: worth an idle disk's time
GUESSED_LOOKUPS = 16  # with more, that what is in RAM of a layer is needed, and worth the link's time


class ExpertSweep:
    """For at most `tokens` tokens, in `room`; `host`'s slots must be page-locked if that is on a GPU.

    `scratch`: memory of at least `least_bytes` that is the caller's while `run` is not under way. What `run` returns
    lies there, in `out`.
    """

    def __init__(self, host: Host, top_k: int, tokens: int, room: Room, least_bytes: int = 0) -> None:
        catalog, device = host.catalog, room.memory.device
        self.room, self.layout, self.device, self.experts = room, catalog.layout, device, catalog.offsets.shape[1]
        self.feed = Feed(host)
        self.layers, self.top_k = len(catalog.offsets), top_k
        places = room.take(RING_GROUPS * ring_group(tokens), self.layout.block_bytes, dtype=torch.uint8)
        self.scratch = room.take(max(least_bytes, products_bytes(self.layout, top_k, tokens)), dtype=torch.uint8)
        products = Room(self.scratch)
        made = products.take(tokens * max(2 * self.layout.width, 4 * self.layout.latent), dtype=torch.uint8)
        self.h = Room(made).take(tokens, self.layout.width, dtype=torch.float16)
        self.out = Room(made).take(tokens, self.layout.latent, dtype=torch.float32)  # once `down` has read h
        self.y = products.take(tokens * top_k, self.layout.latent, dtype=torch.float16)
        self.up_scales = torch.from_numpy(catalog.up_scales).to(device)
        self.down_scales = torch.from_numpy(catalog.down_scales).to(device)
        self.places, self.ring = places, Ring(host, places, RING_GROUPS, most_rows=tokens)
        self.products = Products(places, self.layout, self.ring.tables, top_k, self.h, self.y)
        self.tokens = tokens
        self.counts = torch.zeros(self.experts, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.copied_bytes = self.named_blocks = 0  # since the start; a block counts once in each call that names it

    def reserve(self) -> None:
        """Sorts as many ids as there may be: what torch takes of the card for that stays its own, whoever takes the
        rest. To be called when nothing empties its cache any more."""
        prefill.order(torch.zeros(self.tokens, self.top_k, dtype=torch.int32, device=self.device), self.experts)

    def ahead(self, layer: int, tokens: int) -> None:
        """The first blocks of this layer begin to come, if so many tokens will need all but few: the link is idle while
        other layers compute. Not before the first layer: until then others may use the room. Raises RingError."""
        if layer and tokens * self.top_k >= GUESSED_LOOKUPS * self.experts:
            self.feed.guess(layer)
            self.copied_bytes += self.ring.ahead() * self.layout.block_bytes

    def stop(self) -> None:
        """No layer will run: what came ahead is let go of, and nothing is expected."""
        self._let_go()
        self.feed.expect(0, [])

    def run(self, layer: int, ids: Tensor, weights: Tensor, x: Tensor) -> Generator[float, None, Tensor]:
        """ids int32 and weights float32 [T, top_k], x float16 [T, latent] -> float32 [T, latent], queued on the
        current stream; part of `out`. Yields the share that is done wherever others may run. Raises BlockError."""
        order = prefill.order(ids, self.experts)
        self.counts.copy_(order.starts.diff(), non_blocking=True)
        self._synchronize()
        counts = self.counts.numpy().copy()
        named, done = int(np.count_nonzero(counts)), 0
        self.named_blocks += named
        self.feed.begin(layer, counts, len(ids))
        if layer + 1 < self.layers and ids.numel() >= EXPECTED_LOOKUPS * self.experts:
            self.feed.expect(layer + 1, np.arange(self.experts, dtype=np.int32))
        stream = self._stream()
        try:
            self.products.bind(order, x, self.up_scales[layer], self.down_scales[layer])
            while (group := self.ring.next(counts, stream)) is not None:
                with named_range("sweep: a group's experts, MoE layer", layer):
                    self._compute(group, stream)
                self.copied_bytes += group.copied * self.layout.block_bytes
                done += group.blocks
                if done < named:
                    yield done / named
        finally:
            self._let_go()
        out = self.out[: len(ids)]
        prefill.combine(self.y[: ids.numel()], weights, out)
        return out

    def _let_go(self) -> None:
        self.ring.drain()
        self.feed.end()

    def _compute(self, group: Group, stream: int) -> None:
        for first, items, most_rows in group.passes:
            self.products.queue(first, items, most_rows, stream)
        self.ring.used(stream)

    def _stream(self) -> int:
        return int(torch.cuda.current_stream().cuda_stream) if self.device.type == "cuda" else 0

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
