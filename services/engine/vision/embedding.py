"""One picture through tower and projector, a piece of work at a time. Owns nothing between two pictures."""

from collections.abc import Generator

import torch
from torch import Tensor

from services.engine.vision import projector, tower
from services.engine.vision.weights import VisionWeights


def embed(weights: VisionWeights, patches: Tensor, grid: tuple[int, int]) -> Generator[None, None, Tensor]:
    """patches float32 [rows * columns, 3 patch^2] -> rows for the language model, float32 [tokens, hidden].

    Yields between two pieces of work, of which each takes about as long as a block of the tower.
    """
    with torch.inference_mode():
        positions = tower.position_window(weights.table(), grid)
        x = tower.embed(patches, weights.plain("embedder"), weights.plain("class_tokens"), positions)
        del positions, patches
    yield
    running = tower.forward(weights.blocks(), x, weights.config.heads)
    x = yield from without_gradients(running)
    with torch.inference_mode():
        last = (weights.plain("final_norm.weight"), weights.plain("final_norm.bias"))
        shuffled = projector.shuffle(tower.features(x, weights.config.prefix, *last), grid)
    del x, running
    norm, slices = weights.plain("projector.norm"), weights.projector_slices()
    return (yield from without_gradients(projector.project(shuffled, norm, slices, weights.config.hidden)))


def without_gradients(work: Generator[None, None, Tensor]) -> Generator[None, None, Tensor]:
    """Inference mode belongs to a thread: it is on only while this runs, not while its caller has the word."""
    while True:
        try:
            with torch.inference_mode():
                next(work)
        except StopIteration as done:
            result: Tensor = done.value
            return result
        yield


def run(work: Generator[None, None, Tensor]) -> Tensor:
    """The whole of it at once."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: Tensor = done.value
            return result
