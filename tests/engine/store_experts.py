"""Experts straight from a store through the reference arithmetic: no slots, no readers. Also keeps what was guessed."""

from functools import cache

import torch
from torch import Tensor

from kernels.experts import reference
from services.engine.experts.store import Store


class StoreExperts:
    """What the model sees of its experts. `guesses[layer]` is the last hint, `asked` every (layer, ids) of a step."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.guesses: dict[int, list[int]] = {}
        self.asked: list[tuple[int, Tensor]] = []
        self.unpacked = cache(self._unpack)

    def step(self, layer: int, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        self.asked.append((layer, ids))
        return reference.step(ids, weights, x, lambda id_: self.unpacked(layer, id_))

    def prefetch(self, layer: int, ids: Tensor) -> None:
        assert ids.dtype == torch.int32
        self.guesses[layer] = ids.tolist()

    def _unpack(self, layer: int, expert: int) -> reference.Expert:
        block = self.store.blocks[layer][expert]
        data = self.store.read_block(layer, expert)
        return reference.unpack_expert(data, self.store.layout, block.up_scale, block.down_scale)
