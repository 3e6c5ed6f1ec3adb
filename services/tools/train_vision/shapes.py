"""Outlines of the shapes that are drawn, and colours by name. Owns no picture."""

import colorsys
import math
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

Outline = npt.NDArray[np.float64]
Tone = tuple[int, int, int]
# Ranges of hue (degrees), saturation and value that nobody would call otherwise.
_TONES: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "red": ((-8, 6), (0.78, 1.0), (0.7, 1.0)),
    "green": ((95, 150), (0.55, 1.0), (0.4, 1.0)),
    "blue": ((208, 242), (0.6, 1.0), (0.5, 1.0)),
    "yellow": ((48, 61), (0.7, 1.0), (0.88, 1.0)),
    "orange": ((23, 39), (0.8, 1.0), (0.88, 1.0)),
    "purple": ((268, 302), (0.5, 1.0), (0.38, 0.8)),
    "pink": ((322, 350), (0.24, 0.6), (0.92, 1.0)),
    "brown": ((18, 32), (0.5, 0.9), (0.3, 0.56)),
    "black": ((0, 360), (0.0, 0.3), (0.0, 0.1)),
    "white": ((0, 360), (0.0, 0.03), (0.94, 1.0)),
    "grey": ((0, 360), (0.0, 0.05), (0.42, 0.78)),
}
_PALE = {"green": (95, 150), "blue": (200, 230), "yellow": (50, 60)}  # of backgrounds


def tone(choice: random.Random, colour: str, background: bool = False) -> Tone:
    hues, saturations, values = _TONES[colour]
    if background and colour in _PALE and choice.random() < 0.4:
        hues, saturations, values = _PALE[colour], (0.2, 0.4), (0.9, 1.0)
    hue, saturation, value = (choice.uniform(*each) for each in (hues, saturations, values))
    red, green, blue = colorsys.hsv_to_rgb(hue / 360 % 1, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def contrasting(choice: random.Random, colour: str, ground: Tone) -> Tone:
    """A tone of the colour that can be told from the ground, if there is one."""
    for _ in range(12):
        found = tone(choice, colour)
        difference = np.subtract(found, ground)
        if abs(difference @ (0.299, 0.587, 0.114)) > 50 or (abs(difference).max() > 120 and len(set(found)) > 1):
            break
    return found


def _corners(shape: str, ratio: float) -> list[tuple[float, float]]:
    """Of radius 1, the first one above; `ratio` is how deep a cross or a star is cut in."""
    if shape == "star":
        turns = ((i * math.pi / 5, ratio if i % 2 else 1.0) for i in range(10))
        return [(r * math.sin(turn), -r * math.cos(turn)) for turn, r in turns]
    if shape == "cross":
        arm = 2 * ratio - 0.58
        quarter = [(-arm, -1.0), (arm, -1.0), (arm, -arm)]
        return [p for n in range(4) for x, y in quarter for p in [_turned(x, y, n)]]
    if shape == "heart":
        turns_ = (i * math.pi / 20 for i in range(40))
        return [
            (math.sin(t) ** 3, -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16)
            for t in turns_
        ]
    sides, start = {"square": (4, 0.125), "triangle": (3, 0.0), "circle": (48, 0.0)}[shape]
    around = (2 * math.pi * (start + i / sides) for i in range(sides))
    return [(math.sin(turn), -math.cos(turn)) for turn in around]


def _turned(x: float, y: float, quarters: int) -> tuple[float, float]:
    for _ in range(quarters):
        x, y = -y, x
    return x, y


def outline(choice: random.Random, shape: str, radius: float) -> Outline:
    """[points, 2] around (0, 0), at most about `radius` from it: turned, stretched, perhaps with a shaky hand."""
    corners = np.array(_corners(shape, choice.uniform(0.35, 0.52)))
    shaky = choice.random() < 0.3
    if shaky and len(corners) < 40:
        steps = np.arange(6)[None, :, None] / 6
        corners = (corners[:, None] * (1 - steps) + np.roll(corners, -1, 0)[:, None] * steps).reshape(-1, 2)
    if shaky:
        along = np.arange(len(corners)) * (2 * math.pi / len(corners))
        waves = sum(
            choice.uniform(-0.035, 0.035) * np.cos(k * along + choice.uniform(0, 2 * math.pi)) for k in (2, 3, 5, 7)
        )
        corners = corners * (1 + np.asarray(waves))[:, None]
    if choice.random() < 0.35:
        corners = (
            corners * (choice.uniform(0.8, 1.0), 1.0)
            if choice.random() < 0.5
            else corners * (1.0, choice.uniform(0.8, 1.0))
        )
    turn = _turn(choice, shape)
    cos, sin = math.cos(turn), math.sin(turn)
    return np.asarray(radius * (corners @ np.array([[cos, sin], [-sin, cos]])))


def _turn(choice: random.Random, shape: str) -> float:
    kind = choice.random()
    if kind < 0.5:
        return 0.0
    if shape == "heart" or kind < 0.7:
        return choice.uniform(-0.4, 0.4)
    return choice.uniform(0, 2 * math.pi)


def draw(image: Image.Image, points: Outline, fill: Tone | None, line: Tone | None, width: float, smooth: bool) -> None:
    """Into the picture; edges are blended with what is there if `smooth`."""
    if not smooth:
        _draw(ImageDraw.Draw(image), points, fill, line, width)
        return
    reach = width / 2 + 2
    left, top = (int(v) for v in np.floor(points.min(0) - reach))
    right, bottom = (int(v) for v in np.ceil(points.max(0) + reach))
    by = 2 if max(right - left, bottom - top) > 160 else 3
    for ink, filled in ((fill, True), (line, False)):
        if ink is None:
            continue
        mask = Image.new("L", (by * (right - left), by * (bottom - top)))
        moved = (points - (left, top)) * by
        _draw(ImageDraw.Draw(mask), moved, 255 if filled else None, None if filled else 255, by * width)
        image.paste(ink, (left, top), mask.reduce(by))


def _draw(
    pen: ImageDraw.ImageDraw, points: Outline, fill: Tone | int | None, line: Tone | int | None, width: float
) -> None:
    around: Sequence[tuple[float, float]] = [tuple(p) for p in points.tolist()]
    if fill is not None:
        pen.polygon(around, fill=fill)
    if line is not None:
        pen.line([*around, *around[:2]], fill=line, width=max(1, round(width)), joint="curve")
