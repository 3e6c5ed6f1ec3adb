"""What is taught, from easy to hard, and how much of each at any time. Knows no pixels.

A lesson begins once those before it are known, or when its time has come; what is known is practised less.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from services.tools.train_vision import scenes
from services.tools.train_vision.scenes import Kind, Scene

KNOWN = 0.8  # of a lesson's pictures, told right


@dataclass(frozen=True)
class Lesson:
    """`share` of the pictures once all lessons have begun; `begins` at that part of a stage, at the latest.
    `most`: of simple scenes, plainly drawn; see `scenes.scene`."""

    name: str
    kind: Kind
    share: float
    begins: float
    most: int = 0


LESSONS = (
    Lesson("one", "things", 4, 0.0, 1),
    Lesson("some", "things", 9, 0.0, scenes.MOST),
    Lesson("digits", "number", 6, 0.0, 2),
    Lesson("figures", "number", 14, 0.04, scenes.DIGITS),
    Lesson("things", "things", 27, 0.06),
    Lesson("number", "number", 28, 0.12),
    Lesson("word", "word", 7, 0.25),
    Lesson("invoice", "invoice", 5, 0.4),
)
_NOTHING = 0.1  # of things


def scene(choice: random.Random, lesson: Lesson) -> Scene:
    kind: Kind = "nothing" if lesson.name == "things" and choice.random() < _NOTHING else lesson.kind
    return scenes.scene(choice, kind, most=lesson.most)


def weights(known: Sequence[float], part: float, sooner: float = 1.0) -> list[float]:
    """How likely a picture is of each lesson: `known` is the share that is told right of each, `part` how much of the
    stage's time is over. Lessons begin so much `sooner` for a tower that knows some of them already."""
    found, before = [], True
    for lesson, right in zip(LESSONS, known, strict=True):
        begun = before or part * sooner >= lesson.begins
        found.append(lesson.share * (1.2 - right) if begun else 0.0)
        before = before and right >= KNOWN
    return found
