"""What a GPU routes, for a trace: read back from the card behind each step, and in each layer of a sweep.

Owns what of a sweep is not written yet: a trace has whole calls, and steps may run between a sweep's layers. One that
is given up leaves nothing. A step's numbers are those that the card keeps until the next step (token.py), so that a
recorded step costs a copy of some kilobytes, and any other step nothing.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from services.engine.experts.trace import DECODE, PREFILL, Phases, Recorder
from services.engine.gpu.token import Token


class Tracing:
    """Writes to a recorder, which others close. One thread's: the one that runs the model."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._layers: list[tuple[Tensor, Tensor]] = []  # of the sweep under way

    def step(self, token: Token, prompts: Sequence[bool]) -> None:
        """After a step has ended: which of its rows are of `prompts`. Waits for the card."""
        phase: Phases = np.array([PREFILL if prompt else DECODE for prompt in prompts], np.uint8)
        chosen, weights, guessed = (kept.cpu() for kept in (token.chosen, token.chosen_weights, token.guessed_weights))
        layers, kinds = chosen.shape[:2]
        for layer in range(layers):
            self._recorder.record(layer, chosen[layer, 0], weights[layer], phase)
            if kinds == 2 and layer + 1 < layers:
                self._recorder.record(layer + 1, chosen[layer, 1], guessed[layer], phase, ahead=1)

    def begin_sweep(self) -> None:
        self._layers.clear()

    def sweep(self, ids: Tensor, weights: Tensor) -> None:
        """Its next layer: int32 and float32 [tokens, top_k] on the card, which is waited for."""
        self._layers.append((ids.to("cpu", copy=True), weights.to("cpu", copy=True)))

    def end_sweep(self) -> None:
        for layer, (ids, weights) in enumerate(self._layers):
            self._recorder.record(layer, ids, weights, np.full(len(ids), PREFILL, np.uint8))
        self._layers.clear()
