"""Drawings as batches of any grids: patches, labels, and ids as the served model reads them. Owns no weights."""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from services.api import shown
from services.api.model_folder import load_model_folder
from services.api.pictures import PLACE
from services.engine.vision.config import VisionConfig
from services.engine.vision.grid import patch_grid
from services.tools.train_vision import scenes
from services.tools.train_vision.drawings import Drawing, of_lesson, size_for
from services.tools.train_vision.labels import COUNT, NONE, labels
from services.tools.train_vision.lessons import LESSONS
from services.tools.train_vision.marks import PER_PATCH, Mark, on_patches
from services.tools.train_vision.network import GRIDS, MOST_PATCHES
from services.tools.train_vision.scenes import Asked, Scene

# Rows and columns of patches, as often as pictures to learn from have them: squares, and what screens, photographs and
# pages are like.
TAUGHT_GRIDS = {(16, 16): 8, (14, 18): 5, (12, 20): 3, (18, 14): 2, (20, 12): 1, (10, 24): 1, (10, 22): 1}
IGNORED = -100
LENGTH = 160  # ids of a picture with its questions: of one length, for which layers are compiled
MOST_SAID = 32  # ids of its answers
MOST_ASKED = 3  # questions about a picture, one after the other
_QUESTION, _ANSWER = "QUESTION", "ANSWER"


@dataclass(frozen=True)
class Batch:
    """Of `n` drawings: uint8 patches [n, MOST_PATCHES, 3 patch^2] as `Network.padded` takes them, numbers in GRIDS [n],
    labels int8 [n, COUNT], int8 on_patches [n, MOST_PATCHES, PER_PATCH], ids and targets int16 [n, LENGTH], numbers of
    lessons int8 [n]."""

    patches: Tensor
    grids: Tensor
    labels: Tensor
    on_patches: Tensor
    ids: Tensor
    targets: Tensor
    lessons: Tensor

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def to(self, device: str) -> "Batch":
        return Batch(*(part.to(device, non_blocking=True) for part in self.tensors()))


@dataclass(frozen=True)
class Shown:
    """A picture, what it is made to, what is asked about it, and what is known of it, if anything."""

    image: Image.Image
    grid: tuple[int, int]
    asked: Sequence[Asked]
    scene: Scene | None = None
    marks: Sequence[Mark] = ()
    lesson: int = 0


class Prompts:
    """Questions as the served model reads them: the checkpoint's template and tokenizer."""

    def __init__(self, checkpoint: Path) -> None:
        folder = load_model_folder(checkpoint)
        self._encode = lru_cache(maxsize=65536)(folder.tokenizer.encode)  # what is said repeats itself
        self.picture_id = folder.tokenizer.added[shown.TOKEN].id
        self._end = folder.defaults.stop_ids[-1]
        # Rendered once: all that differs are questions and answers, which stand between texts that stay.
        user = {"role": "user", "content": f"{PLACE}\n{_QUESTION}"}
        then = [{"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _QUESTION}]
        prompt = folder.template.prompt([user, *then], None, {"enable_thinking": False}, [shown.Shown(b"", 1)])
        before, self._opening, self._after = prompt.text.split(_QUESTION)
        self._opening, self._closing = self._opening.split(_ANSWER)
        before_ids = self._encode(before)
        at = before_ids.index(self.picture_id)
        self._before, self._between = before_ids[:at], before_ids[at + 1 :]
        # What ends an answer when another question follows, from the id on that ends it when none does.
        self._next = self._encode(self._closing)

    def ids(self, asked: Asked, tokens: int) -> tuple[list[int], list[int]]:
        """Of the prompt with a picture of so many tokens, and of the answer with the id that ends it."""
        question = [*self._between, *self._encode(asked.question + self._after)]
        return [*self._before, *[self.picture_id] * tokens, *question], [*self._encode(asked.answer), self._end]

    def dialog(self, asked: Sequence[Asked], tokens: int) -> tuple[list[int], list[int]]:
        """Ids of a picture of so many tokens with as many of the questions, and their answers, as there is room for;
        and what is wanted at each place, IGNORED where nothing is."""
        ids: list[int] = []
        targets: list[int] = []
        said = 0
        for one in asked:
            if ids:
                if self._next[0] != self._end:
                    break
                question = [*self._next[1:], *self._encode(one.question + self._after)]
                answer = [*self._encode(one.answer), self._end]
            else:
                question, answer = self.ids(one, tokens)
            if len(ids) + len(question) + len(answer) > LENGTH or said + len(answer) > MOST_SAID:
                break
            said += len(answer)
            ids += [*question, *answer]
            targets += [IGNORED] * (len(question) - 1) + answer + [IGNORED]
        return ids, targets


class Drawings(IterableDataset[Batch]):
    """Batches of `size` without end, each worker's own, of all lessons by their shares; `first` is the number of the
    first, and the number says what is in it."""

    def __init__(self, prompts: Prompts, config: VisionConfig, size: int, first: int) -> None:
        self._prompts, self._config, self._size, self._first = prompts, config, size, first

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        torch.set_num_threads(1)
        if worker:
            os.nice(5)  # who learns, and compiles, goes first
        while True:
            yield self.batch(self._first + number)
            number += count

    def batch(self, number: int) -> Batch:
        choice = random.Random(f"taught {number}")
        taught = choice.choices(range(len(LESSONS)), [lesson.share for lesson in LESSONS], k=self._size)
        rows = []
        for lesson in taught:
            grid = choice.choices(list(TAUGHT_GRIDS), list(TAUGHT_GRIDS.values()))[0]
            config = self._config
            size = size_for(choice, grid, config.patch, (config.least_patches, config.most_patches))
            drawn = of_lesson(choice, LESSONS[lesson], size)
            asked = _questions(choice, drawn)
            rows.append(Shown(drawn.image, grid, asked, drawn.scene, drawn.marks, lesson))
        return batch(self._prompts, self._config.patch, rows)


def batch(prompts: Prompts, patch: int, rows: Sequence[Shown]) -> Batch:
    patches = np.zeros((len(rows), MOST_PATCHES, 3 * patch * patch), np.uint8)
    told = np.full((len(rows), MOST_PATCHES, PER_PATCH), NONE, np.int8)
    ids = np.zeros((len(rows), LENGTH), np.int16)
    targets = np.full_like(ids, IGNORED)
    for row, one in enumerate(rows):
        count = one.grid[0] * one.grid[1]
        patches[row, :count] = cut(one.image, one.grid, patch)
        told[row, :count] = _in_order(on_patches(one.marks, one.image.size, one.grid))
        found, wanted = prompts.dialog(one.asked, count // 4)
        ids[row, : len(found)], targets[row, : len(wanted)] = found, wanted
    return Batch(
        torch.from_numpy(patches),
        torch.tensor([GRIDS.index(one.grid) for one in rows]),
        torch.tensor([labels(one.scene) if one.scene else [NONE] * COUNT for one in rows], dtype=torch.int8),
        torch.from_numpy(told),
        torch.from_numpy(ids),
        torch.from_numpy(targets),
        torch.tensor([one.lesson for one in rows], dtype=torch.int8),
    )


def cut(image: Image.Image, grid: tuple[int, int], patch: int) -> npt.NDArray[np.uint8]:
    """[patches, 3 patch^2] of the picture made to the grid's size, as the engine has it but for rounding."""
    rows, columns = grid
    size = (columns * patch, rows * patch)
    values = np.asarray(image if image.size == size else image.resize(size, Image.Resampling.BICUBIC))
    whole = values.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    found: npt.NDArray[np.uint8] = _in_order(whole.reshape(rows, columns, -1))
    return found


def grid_of(image: Image.Image, config: VisionConfig) -> tuple[int, int]:
    """What the engine makes the picture to."""
    return patch_grid(*image.size, config.patch, config.least_patches, config.most_patches)


def loader(drawings: Drawings, workers: int) -> DataLoader[Batch]:
    return DataLoader(drawings, batch_size=None, num_workers=workers, prefetch_factor=2 if workers else None)


def _questions(choice: random.Random, drawn: Drawing) -> list[Asked]:
    """What the drawing comes with, and more about it, each on another topic; about an invoice, any other."""
    found = [drawn.asked]
    for _ in range(6):
        topic = choice.choice(scenes.topics(drawn.scene))
        one = scenes.ask(drawn.scene, topic, choice)
        other = one.question not in [before.question for before in found]
        if other and (drawn.scene.kind == "invoice" or topic not in [before.topic for before in found]):
            found.append(one)
        if len(found) == MOST_ASKED:
            break
    return found


def _in_order(of_grid: npt.NDArray[Any]) -> Any:
    """As `network.in_order`."""
    rows, columns, size = of_grid.shape
    return of_grid.reshape(rows // 2, 2, columns // 2, 2, size).transpose(0, 2, 1, 3, 4).reshape(rows * columns, size)
