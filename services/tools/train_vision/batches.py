"""Drawings as batches, each of one grid: pixels, labels, and ids as the served model reads them. Owns no weights."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from services.api.model_folder import load_model_folder
from services.api.pictures import PLACE
from services.api.shown import TOKEN, Shown
from services.engine.vision.config import VisionConfig
from services.tools.train_vision.drawings import HELD_OUT, drawing, size_for
from services.tools.train_vision.labels import labels
from services.tools.train_vision.scenes import Asked

# Rows and columns of patches, as often as a batch has them: squares, and what screens, photographs and pages are like.
GRIDS = {(16, 16): 8, (14, 18): 5, (12, 20): 3, (18, 14): 2, (20, 12): 1, (10, 24): 1, (10, 22): 1}
IGNORED = -100
_QUESTION = "QUESTION"
_STEP = 120  # lengths of prompts are multiples of it: of one length nearly always, for which layers are compiled


@dataclass(frozen=True)
class Batch:
    """Of `n` drawings: uint8 pixels [n, height, width, 3], labels [n, COUNT], ids and targets [n, longest]."""

    pixels: Tensor
    labels: Tensor
    ids: Tensor
    targets: Tensor
    grid: tuple[int, int]
    topics: tuple[str, ...]

    def to(self, device: str) -> "Batch":
        pixels, labels, ids, targets = (
            part.to(device, non_blocking=True) for part in (self.pixels, self.labels, self.ids, self.targets)
        )
        return Batch(pixels, labels, ids, targets, self.grid, self.topics)


class Prompts:
    """Questions as the served model reads them: the checkpoint's template and tokenizer."""

    def __init__(self, checkpoint: Path) -> None:
        folder = load_model_folder(checkpoint)
        self._encode = folder.tokenizer.encode
        self.picture_id = folder.tokenizer.added[TOKEN].id
        self._end = folder.defaults.stop_ids[-1]
        # Rendered once: all that differs is the question, which stands between a line break and a special token.
        prompt = folder.template.prompt(
            [{"role": "user", "content": f"{PLACE}\n{_QUESTION}"}], None, {"enable_thinking": False}, [Shown(b"", 1)]
        )
        before, self._after = prompt.text.split(_QUESTION)
        before_ids = self._encode(before)
        at = before_ids.index(self.picture_id)
        self._before, self._between = before_ids[:at], before_ids[at + 1 :]

    def ids(self, asked: Asked, tokens: int) -> tuple[list[int], list[int]]:
        """Of the prompt with a picture of so many tokens, and of the answer with the id that ends it."""
        question = [*self._between, *self._encode(asked.question + self._after)]
        return [*self._before, *[self.picture_id] * tokens, *question], [*self._encode(asked.answer), self._end]


class Drawings(IterableDataset[Batch]):
    """Batches without end, each worker's own; the `first` one's number says what is in it."""

    def __init__(self, prompts: Prompts, config: VisionConfig, size: int, first: int, held_out: bool) -> None:
        self._prompts, self._config = prompts, config
        self._size, self._first, self._held_out = size, first, held_out

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        torch.set_num_threads(1)
        while True:
            yield self.batch(self._first + number)
            number += count

    def batch(self, number: int) -> Batch:
        config, choice = self._config, random.Random(number)
        grid = choice.choices(list(GRIDS), list(GRIDS.values()))[0]
        height, width = (side * config.patch for side in grid)
        pixels = torch.empty(self._size, height, width, 3, dtype=torch.uint8)
        first = number * self._size + (HELD_OUT if self._held_out else 0)
        told, texts = [], []
        for row in range(self._size):
            size = size_for(choice, grid, config.patch, (config.least_patches, config.most_patches))
            drawn = drawing(first + row, size)
            image = drawn.image
            if image.size != (width, height):
                image = image.resize((width, height), Image.Resampling.BICUBIC)
            pixels[row] = torch.from_numpy(np.array(image))
            told.append(drawn)
            texts.append(self._prompts.ids(drawn.asked, grid[0] * grid[1] // 4))
        longest = -(-max(len(prompt) + len(answer) for prompt, answer in texts) // _STEP) * _STEP
        ids = torch.zeros(self._size, longest, dtype=torch.long)
        targets = torch.full_like(ids, IGNORED)
        for row, (prompt, answer) in enumerate(texts):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            targets[row, len(prompt) - 1 : len(prompt) + len(answer) - 1] = torch.tensor(answer)
        numbers = torch.tensor([labels(one.scene) for one in told])
        return Batch(pixels, numbers, ids, targets, grid, tuple(one.asked.topic for one in told))


def loader(drawings: Drawings, workers: int) -> DataLoader[Batch]:
    return DataLoader(drawings, batch_size=None, num_workers=workers, prefetch_factor=1 if workers else None)
