"""Pictures as a person would paint them, by code that shares none with what was trained on: a thick brush on paper of
usual sizes, shapes off the centre and unevenly drawn, a number or a word in a system's own letters.

Only ever asked about. Owns a brush.
"""

import itertools
import math
import random
from collections.abc import Iterator

from PIL import Image, ImageDraw

from services.tools.train_vision import fonts, scenes
from services.tools.train_vision.scenes import Asked, Group, Scene

SIZES = ((800, 600), (1024, 1024), (300, 300), (640, 400), (500, 700))
# As the palettes of painting programs have them.
PALETTE = {
    "red": (237, 28, 36),
    "green": (34, 177, 76),
    "blue": (63, 72, 204),
    "yellow": (255, 242, 0),
    "orange": (255, 127, 39),
    "purple": (128, 0, 128),
    "pink": (255, 105, 180),
    "brown": (139, 69, 19),
    "black": (0, 0, 0),
    "white": (255, 255, 255),
    "grey": (127, 127, 127),
}
Point = tuple[float, float]


def painting(seed: int) -> tuple[Image.Image, Scene, Asked]:
    choice = random.Random(f"painted {seed}")
    size = choice.choice(SIZES)
    ground = choice.choice(("white", "white", "white", "yellow", "blue", "grey", "black"))
    image = Image.new("RGB", size, PALETTE[ground])
    if choice.random() < 0.25:
        kind: scenes.Kind = choice.choice(("number", "word"))
        seen = scenes.scene(choice, kind, held_out=True)
        inks = [ink for ink in scenes.unlike((ground,)) if abs(_lightness(ink) - _lightness(ground)) > 50]
        seen = Scene(kind, ground, text=seen.text, ink=choice.choice(inks))
        _letter(image, choice, seen)
    else:
        colour = choice.choice(scenes.unlike((ground,)))
        seen = Scene("things", ground, (Group(choice.choice((1, 1, 1, 2, 3)), colour, choice.choice(scenes.SHAPES)),))
        _things(image, choice, seen.groups[0])
    return image, seen, scenes.ask(seen, choice.choice(scenes.topics(seen)), choice)


def _things(image: Image.Image, choice: random.Random, group: Group) -> None:
    """Side by side or one above the other, each somewhere in its part of the paper."""
    wide = image.width >= image.height
    cell = (image.width / group.count, image.height) if wide else (image.width, image.height / group.count)
    pen, filled = ImageDraw.Draw(image), choice.random() < 0.5
    for number in range(group.count):
        radius = min(cell) * choice.uniform(0.18, 0.42)
        brush = max(4.0, radius * choice.uniform(0.08, 0.2))
        reach = radius * 1.08 + brush / 2
        corner = (cell[0] * number, 0.0) if wide else (0.0, cell[1] * number)
        centre = [
            corner[i] + choice.uniform(min(reach, cell[i] / 2), max(cell[i] - reach, cell[i] / 2)) for i in (0, 1)
        ]
        for stroke in _strokes(group.shape):
            path = [(centre[0] + radius * x, centre[1] + radius * y) for x, y in _uneven(choice, stroke)]
            if filled and group.shape != "cross":
                pen.polygon(path, fill=PALETTE[group.colour])
            wide_brush = radius * 0.35 if group.shape == "cross" else brush
            _brush(pen, path, wide_brush, PALETTE[group.colour])


def _strokes(shape: str) -> list[list[Point]]:
    """Lines of a hand that paints the shape, of radius 1; all but a cross end where they began."""
    if shape == "circle":
        return [[(math.cos(t / 20 * math.pi), math.sin(t / 20 * math.pi)) for t in range(41)]]
    if shape == "cross":
        return [[(-0.95, 0.0), (0.95, 0.0)], [(0.0, -0.95), (0.0, 0.95)]]
    corners: list[Point]
    if shape == "heart":
        left = [(0.0, 0.9), (-0.6, 0.3), (-0.95, -0.2), (-0.85, -0.65), (-0.5, -0.85), (-0.15, -0.7), (0.0, -0.4)]
        corners = [*left, *((-x, y) for x, y in reversed(left))]
    elif shape == "star":
        tips = [(math.sin(i * 0.4 * math.pi), -math.cos(i * 0.4 * math.pi)) for i in range(5)]
        inner = [
            (0.42 * math.sin((i + 0.5) * 0.4 * math.pi), -0.42 * math.cos((i + 0.5) * 0.4 * math.pi)) for i in range(5)
        ]
        corners = [point for pair in zip(tips, inner, strict=True) for point in pair]
    elif shape == "square":
        corners = [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]
    else:
        corners = [(0.0, -0.95), (0.9, 0.7), (-0.9, 0.7)]
    return [[*corners, corners[0]]]


def _uneven(choice: random.Random, path: list[Point]) -> Iterator[Point]:
    """The same line with a corner every now and then a little beside where it should be."""
    moved = [(x + choice.gauss(0, 0.025), y + choice.gauss(0, 0.025)) for x, y in path]
    yield from moved[:-1] if path[0] == path[-1] else moved
    if path[0] == path[-1]:
        yield moved[0]


def _brush(pen: ImageDraw.ImageDraw, path: list[Point], width: float, ink: tuple[int, int, int]) -> None:
    """Round dabs along the line."""
    for (x0, y0), (x1, y1) in itertools.pairwise(path):
        dabs = max(1, round(math.dist((x0, y0), (x1, y1)) / (width / 4)))
        for dab in range(dabs + 1):
            x, y = x0 + (x1 - x0) * dab / dabs, y0 + (y1 - y0) * dab / dabs
            pen.ellipse((x - width / 2, y - width / 2, x + width / 2, y + width / 2), fill=ink)


def _lightness(colour: str) -> float:
    red, green, blue = PALETTE[colour]
    return 0.3 * red + 0.59 * green + 0.11 * blue


def _letter(image: Image.Image, choice: random.Random, seen: Scene) -> None:
    font = fonts.font(choice.choice(fonts.names(held_out=True)), round(min(image.size) * choice.uniform(0.12, 0.24)))
    width = font.getbbox(seen.text)[2]
    if width > 0.94 * image.width:
        font = fonts.font(fonts.OWN, round(min(image.size) * 0.1))
        width = font.getbbox(seen.text)[2]
    at = (choice.uniform(0, image.width - width), choice.uniform(0.1, 0.6) * image.height)
    ImageDraw.Draw(image).text(at, seen.text, font=font, fill=PALETTE[seen.ink])
