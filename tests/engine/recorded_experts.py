"""Real experts of a real store that also keep what the model asked for and what it guessed."""

from typing import Any

import torch
from torch import Tensor

from services.engine.experts.store import Store
from services.engine.experts.streamer import open_experts


class RecordedExperts:
    """`guesses[layer]` is the last hint for a layer, `asked` every (layer, ids) of a step."""

    def __init__(self, store: Store, slots: int) -> None:
        self._experts = open_experts(store, slots=slots, readers=2, prefetch="on")
        self.guesses: dict[int, list[int]] = {}
        self.asked: list[tuple[int, Tensor]] = []

    def step(self, layer: int, ids: Tensor, weights: Tensor, x: Tensor) -> Tensor:
        self.asked.append((layer, ids))
        return self._experts.step(layer, ids, weights, x)

    def prefetch(self, layer: int, ids: Tensor) -> None:
        assert ids.dtype == torch.int32
        self.guesses[layer] = ids.tolist()
        self._experts.prefetch(layer, ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)
