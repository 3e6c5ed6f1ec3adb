"""Pictures to learn from: a scene drawn on paper of any colour, its things of any size, filled or outlined, its text in
any font and size. Owns how scenes look; `lettering.py` writes, `shapes.py` has outlines and colours.

A picture is all that its seed says, on a machine with the same fonts. Seeds from HELD_OUT on are never trained on:
their fonts, words and ways of asking are not in training either.
"""

import io
import math
import random
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from services.engine.vision.grid import patch_grid
from services.tools.train_vision import lessons, lettering, scenes
from services.tools.train_vision.lessons import Lesson
from services.tools.train_vision.marks import Mark
from services.tools.train_vision.scenes import Asked, Kind, Scene
from services.tools.train_vision.shapes import Tone, contrasting, draw, outline, tone

HELD_OUT = 1 << 40
SHARES: dict[Kind, float] = {"things": 43, "number": 21, "word": 14, "invoice": 18, "nothing": 4}
LEAST_PIXELS: dict[Kind, int] = {"number": 96, "word": 120, "invoice": 240}  # a side, for letters that can be read
_GRAIN = np.random.default_rng(0).normal(0, 1, (600, 600, 3)).astype(np.float32)


@dataclass(frozen=True)
class Drawing:
    image: Image.Image = field(repr=False)
    scene: Scene
    asked: Asked
    marks: list[Mark] = field(repr=False)


def drawing(seed: int, size: tuple[int, int] | None = None) -> Drawing:
    """Of `size` (width, height), or of one that the seed says, up to 1024 pixels a side; with text in it, no
    smaller than it takes to read it."""
    choice = random.Random(seed)
    held_out = seed >= HELD_OUT
    kind = choice.choices(list(SHARES), list(SHARES.values()))[0]
    seen = scenes.scene(choice, kind, held_out)
    asked = scenes.ask(seen, choice.choice(scenes.topics(seen)), choice, held_out)
    width, height = size or any_size(choice)
    larger = max(1.0, LEAST_PIXELS.get(kind, 1) / math.sqrt(width * height))
    size = round(width * larger), round(height * larger)
    image, marks = paint(seen, choice, size, held_out)
    return Drawing(image, seen, asked, marks)


def of_lesson(choice: random.Random, lesson: Lesson, size: tuple[int, int]) -> Drawing:
    """As `drawing`, of what is taught in that lesson."""
    seen = lessons.scene(choice, lesson)
    asked = scenes.ask(seen, choice.choice(scenes.topics(seen)), choice)
    larger = max(1.0, LEAST_PIXELS.get(seen.kind, 1) / math.sqrt(size[0] * size[1]))
    size = round(size[0] * larger), round(size[1] * larger)
    image, marks = paint(seen, choice, size, plain=bool(lesson.most))
    return Drawing(image, seen, asked, marks)


def any_size(choice: random.Random) -> tuple[int, int]:
    usual = (
        (800, 600),
        (1024, 1024),
        (300, 300),
        (640, 480),
        (512, 512),
        (600, 800),
        (400, 300),
        (256, 256),
        (1024, 600),
    )
    if choice.random() < 0.5:
        return choice.choice(usual)
    long = choice.randrange(96, 900)
    short = max(64, round(long * choice.uniform(0.45, 1.0)))
    return (long, short) if choice.random() < 0.6 else (short, long)


def size_for(choice: random.Random, grid: tuple[int, int], patch: int, limits: tuple[int, int]) -> tuple[int, int]:
    """A size (width, height) that the engine makes this grid of: a third to twice what the tower will see of it."""
    rows, columns = grid
    for _ in range(20):
        others = (
            choice.uniform(0.85, 1.15),
            choice.uniform(0.32, 1.0),
            choice.uniform(0.32, 0.6),
            choice.uniform(1.0, 2.0),
        )
        scale = choice.choice(others) if choice.random() < 0.5 else 1.0
        stretch = math.exp(choice.uniform(-0.08, 0.08)) if scale != 1.0 else 1.0
        size = (round(columns * patch * scale * stretch), round(rows * patch * scale / stretch))
        if patch_grid(*size, patch, *limits) == grid:
            return size
    return columns * patch, rows * patch


def paint(
    seen: Scene, choice: random.Random, size: tuple[int, int], held_out: bool = False, plain: bool = False
) -> tuple[Image.Image, list[Mark]]:
    """The picture, and where in it things and letters are. `plain`: filled, on even ground, letters large."""
    ground = tone(choice, seen.background, background=True)
    image = Image.new("RGB", size, ground) if plain else _paper(choice, ground, size)
    smooth = choice.random() < 0.75
    marks: list[Mark] = []
    if seen.kind == "things":
        marks = _things(image, seen, choice, ground, smooth, plain)
    elif seen.kind in ("number", "word"):
        ink = contrasting(choice, seen.ink, ground)
        marks = lettering.line(image, choice, seen.text, ink, seen.ink, held_out, smooth, plain)
    elif seen.kind == "invoice":
        marks = lettering.invoice(image, choice, seen.rows, held_out)
    return (image if plain else _worn(image, choice)), marks


def _paper(choice: random.Random, first: Tone, size: tuple[int, int]) -> Image.Image:
    if choice.random() < 0.75:
        return Image.new("RGB", size, first)
    image = Image.new("RGB", (2, 2), first)
    for place in ((0, 0), (1, 1), (0, 1))[: choice.randrange(1, 4)]:
        image.putpixel(place, _near(choice, first, 8 if min(first) > 230 else 24))
    return image.resize(size, Image.Resampling.BILINEAR)


def _near(choice: random.Random, ink: Tone, most: int) -> Tone:
    red, green, blue = (min(255, max(0, value + choice.randrange(-most, most + 1))) for value in ink)
    return red, green, blue


def _things(
    image: Image.Image, seen: Scene, choice: random.Random, ground: Tone, smooth: bool, plain: bool
) -> list[Mark]:
    wanted = [group for group in seen.groups for _ in range(group.count)]
    inks = {group: contrasting(choice, group.colour, ground) for group in seen.groups}
    style = "filled" if plain else choice.choice(("filled", "filled", "filled", "outlined", "both"))
    share = choice.choice((choice.uniform(0.06, 0.22), choice.uniform(0.12, 0.3)))  # of a line's width, of the radius
    dark = all(group.colour not in ("black", "grey", "brown") for group in seen.groups) and seen.background != "black"
    marks = []
    for group, (x, y, radius) in zip(wanted, _places(choice, len(wanted), image.size), strict=True):
        near = 0.8 * radius
        marks.append(Mark(x - near, y - near, x + near, y + near, group.shape, group.colour))
        ink = inks[group]
        points = outline(choice, group.shape, radius) + np.array((x, y))
        width = max(2.0, share * radius)
        if style == "filled" or (style == "both" and (radius < 12 or not dark)):
            draw(image, points, ink, None, 0, smooth)
        elif style == "outlined":
            draw(image, points, None, ink, width, smooth)
        else:
            draw(image, points, ink, (0, 0, 0), max(1.0, min(width, 0.08 * radius)), smooth)
    return marks


def _places(choice: random.Random, count: int, size: tuple[int, int]) -> list[tuple[float, float, float]]:
    """Centres and radii of things that do not touch each other or the edge: any size that so many can have."""
    short, least = min(size), 0.045 * math.sqrt(size[0] * size[1])
    most = max(1.2 * least, 0.47 * short / (1.0, 1.0, 1.5, 1.9, 2.2, 2.4, 2.6)[min(count, 6)])
    radius = (
        math.exp(choice.uniform(math.log(least), math.log(most)))
        if choice.random() < 0.45
        else choice.uniform(least, most)
    )
    if count == 1 and choice.random() < 0.3:
        near = 0.04 * short
        return [(size[0] / 2 + choice.uniform(-near, near), size[1] / 2 + choice.uniform(-near, near), radius * 0.92)]
    found: list[tuple[float, float, float]] = []
    tried = 0
    while len(found) < count:
        tried += 1
        own = radius * choice.uniform(0.75, 1.0)
        x, y = (choice.uniform(min(own + 1, side / 2), max(side - own - 1, side / 2)) for side in size)
        if all(math.dist((x, y), other[:2]) > 1.08 * (own + other[2]) + 2 for other in found):
            found.append((x, y, own))
        elif tried > 25:
            found.clear()
            tried, radius = 0, radius * 0.88
    return found


def _worn(image: Image.Image, choice: random.Random) -> Image.Image:
    """Perhaps with grain, or as a JPEG file made it."""
    kind = choice.random()
    if kind < 0.12:
        width, height = image.size
        x, y = choice.randrange(100), choice.randrange(100)
        tile = np.resize(_GRAIN[y : y + 500, x : x + 500], (height, width, 3)) if max(width, height) > 500 else None
        grain = _GRAIN[y : y + height, x : x + width] if tile is None else tile
        return Image.fromarray(np.clip(np.asarray(image) + choice.uniform(3, 14) * grain, 0, 255).astype(np.uint8))
    if kind < 0.2:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=choice.randrange(45, 96))
        return Image.open(file).convert("RGB")
    return image
