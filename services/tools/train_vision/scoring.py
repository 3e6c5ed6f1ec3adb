"""Examinations at the end of the training: pictures never trained on, every token of the answer the likeliest one.

narrow     small shapes and four digits on light paper: `plain.py`
wide       things and numbers as they are taught, of other seeds and fonts
text       likewise words, others than those taught, and the rows of invoices
otherwise  both, asked in words that are not taught: as much the language model's examination as the tower's
painted    by other code: `painted.py`

`thimble see` asks a running server the same kinds of questions. Owns no network.
"""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Dataset

from services.engine.vision.config import VisionConfig
from services.tools import figures
from services.tools.train_vision import plain, scenes
from services.tools.train_vision.batches import Batch, Prompts, Shown, batch, grid_of
from services.tools.train_vision.drawings import HELD_OUT, drawing
from services.tools.train_vision.painted import painting
from services.tools.train_vision.scenes import TOPICS, Asked

ROWS = 64
_EACH = {"plain": 1, "drawn": 4, "painted": 1}  # batches of these, as often
EXAMS = ("narrow", "wide", "text", "otherwise", "painted")
Topics = list[tuple[str, str]]  # exam and topic of each row
Counted = Counter[tuple[str, str]]


class HeldOut(Dataset[tuple[Batch, Topics]]):
    """Batches of all examinations, `rounds` times what _EACH says."""

    def __init__(self, prompts: Prompts, config: VisionConfig, rounds: int, rows: int = ROWS) -> None:
        self._prompts, self._config, self._rows = prompts, config, rows
        self._sets = [(name, n) for name, each in _EACH.items() for n in range(each * rounds)]

    def __len__(self) -> int:
        return len(self._sets)

    def __getitem__(self, index: int) -> tuple[Batch, Topics]:
        name, number = self._sets[index]
        found = [self._shown(name, number * self._rows + row) for row in range(self._rows)]
        rows = [one for one, _ in found]
        return batch(self._prompts, self._config.patch, rows), [(exam, one.asked[0].topic) for one, exam in found]

    def _shown(self, name: str, number: int) -> tuple[Shown, str]:
        if name == "plain":
            image, asked = plain.drawing(HELD_OUT + number)
            return Shown(image, grid_of(image, self._config), [as_taught(asked)]), "narrow"
        if name == "painted":
            image, _, asked = painting(number)
            return Shown(image, grid_of(image, self._config), [asked]), "painted"
        drawn = drawing(HELD_OUT + number)
        exam, asked = "otherwise", drawn.asked
        if number % 3:
            exam = "text" if drawn.scene.kind in ("word", "invoice") else "wide"
            asked = scenes.ask(drawn.scene, asked.topic, random.Random(number))
        return Shown(drawn.image, grid_of(drawn.image, self._config), [asked]), exam


def as_taught(asked: Asked) -> Asked:
    """The plain drawings' answers in the words that are taught now."""
    answer = f"It says {asked.answer}" if asked.topic == "number" else asked.answer[:1].upper() + asked.answer[1:]
    return Asked(asked.topic, asked.question, answer)


def batches(held_out: HeldOut, workers: int) -> Iterator[tuple[Batch, Topics]]:
    loader: DataLoader[tuple[Batch, Topics]] = DataLoader(
        held_out, batch_size=None, num_workers=workers, collate_fn=_as_it_is
    )
    yield from loader


def _as_it_is(one: Any) -> Any:
    return one  # tuples would become lists


def rows(right: Counted, asked: Counted) -> Iterator[tuple[str, str, int, int]]:
    """Examination, topic or "all", how many are right, and of how many."""
    for exam in EXAMS:
        topics = [topic for topic in TOPICS if asked[exam, topic]]
        for topic in topics:
            yield exam, topic, right[exam, topic], asked[exam, topic]
        if topics:
            whole, of = (sum(counted[exam, topic] for topic in topics) for counted in (right, asked))
            yield exam, "all", whole, of


def lines(right: Counted, asked: Counted) -> Iterator[str]:
    """As they are printed."""
    for exam, topic, so, of in rows(right, asked):
        yield f"held out, {exam:<9} {topic:<11}{so:>5} of {of:<5}{100 * so / max(1, of):6.1f} %"


def record(path: Path, right: Counted, asked: Counted, how: str) -> None:
    """Appends a demo.vision.taught row for each."""
    for exam, topic, so, of in rows(right, asked):
        note = f"{exam}, {topic}: {so} of {of} held out, every token the likeliest, {how}"
        figures.append(path, "demo.vision.taught", 100 * so / max(1, of), "%", note)
