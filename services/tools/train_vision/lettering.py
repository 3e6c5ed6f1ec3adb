"""Text in pictures: a number or a word anywhere, in any size; the rows of a small invoice. Owns where letters stand."""

import math
import random
from collections.abc import Sequence

from PIL import Image, ImageDraw

from services.tools.train_vision import fonts
from services.tools.train_vision.marks import Mark
from services.tools.train_vision.scenes import Row
from services.tools.train_vision.shapes import Tone

_LEAST = 11  # pixels of a font, of 256 that a picture is wide
_HEADS = (("Item", "Qty", "Price"), ("item", "qty", "price"), ("Article", "Pcs", "EUR"), ("Product", "No", "Cost"))


def line(
    image: Image.Image,
    choice: random.Random,
    text: str,
    ink: Tone,
    colour: str,
    held_out: bool,
    smooth: bool,
    plain: bool = False,
) -> list[Mark]:
    """A text that fits, and where its letters are; a word may begin with a capital, or have nothing else. `plain`:
    large and straight. `ink` is a tone of `colour`."""
    width, height = image.size
    text = choice.choice((text, text, text.capitalize(), text.upper()))
    name = choice.choice(fonts.names(held_out))
    wide, high = _extent(name, 40, text)
    most = int(40 * min(0.92 * width / wide, 0.8 * height / high))
    least = min(most, max(8, round((4 if plain else 1.4) * _LEAST * (width * height) ** 0.5 / 256)))
    size = round(least * (most / least) ** choice.random()) if choice.random() < 0.7 else choice.randint(least, most)
    font = fonts.font(name, size)
    left, top, right, bottom = (round(v) for v in font.getbbox(text))
    mask = Image.new("L", (right - left + 2, bottom - top + 2))
    pen = ImageDraw.Draw(mask)
    pen.fontmode = "L" if smooth else "1"
    pen.text((1 - left, 1 - top), text, font=font, fill=255)
    marks = _letters(font, text, colour, (1 - left, 0, mask.height))
    if choice.random() < 0.2 and not plain:
        turn = choice.uniform(-8, 8)
        turned = mask.rotate(turn, Image.Resampling.BICUBIC, expand=True)
        if turned.width <= width and turned.height <= height:
            marks = [_turned(one, turn, mask.size, turned.size) for one in marks]
            mask = turned
    room = (max(0, width - mask.width), max(0, height - mask.height))
    at = (
        (room[0] // 2, room[1] // 2)
        if choice.random() < 0.25
        else (choice.randint(0, room[0]), choice.randint(0, room[1]))
    )
    image.paste(ink, at, mask)
    return [one.moved(*at) for one in marks]


def _letters(font: fonts.Font, text: str, colour: str, at: tuple[float, float, float]) -> list[Mark]:
    """Of a line that begins at `at` (left, top, bottom)."""
    ends = [at[0] + font.getlength(text[:count]) for count in range(len(text) + 1)]
    return [Mark(ends[i], at[1], ends[i + 1], at[2], one.lower(), colour) for i, one in enumerate(text)]


def _turned(mark: Mark, degrees: float, old: tuple[int, int], new: tuple[int, int]) -> Mark:
    """As Pillow turns a picture of size `old` about its middle into one of size `new`."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    x, y = (mark.left + mark.right - old[0]) / 2, (mark.top + mark.bottom - old[1]) / 2
    to = new[0] / 2 + x * cos + y * sin - x - old[0] / 2, new[1] / 2 - x * sin + y * cos - y - old[1] / 2
    return mark.moved(*to)


def invoice(image: Image.Image, choice: random.Random, rows: Sequence[Row], held_out: bool) -> list[Mark]:
    """Items, quantities and prices in columns, perhaps below a title and headings, perhaps with lines between; and
    where all letters are."""
    width, height = image.size
    texts = [(row.item, row.quantity, row.price) for row in rows]
    if choice.random() < 0.5:
        texts.insert(0, choice.choice(_HEADS))
    if choice.random() < 0.3:
        texts.insert(0, (choice.choice(("Invoice", "Bill", "INVOICE")), "", ""))
    name = choice.choice(fonts.names(held_out))
    gap = choice.uniform(1.25, 1.9)
    columns = [max(_extent(name, 40, text[i])[0] for text in texts) for i in range(3)]
    spaces = choice.uniform(30, 70)
    most = 40 * min(0.94 * width / (sum(columns) + 2 * spaces), 0.94 * height / (len(texts) * gap * 40))
    size = max(6, int(most * choice.uniform(0.8, 1.0)))
    font, scale = fonts.font(name, size), size / 40
    used = (sum(columns) + 2 * spaces) * scale, len(texts) * gap * size
    left = choice.uniform(0.02 * width, max(0.02 * width, 0.98 * width - used[0]))
    top = choice.uniform(0.02 * height, max(0.02 * height, 0.98 * height - used[1]))
    dark = choice.choice(((0, 0, 0), (20, 20, 60), (50, 50, 50)))
    ends = (left, left + (columns[0] + spaces + columns[1]) * scale, left + used[0])
    pen, ruled = ImageDraw.Draw(image), choice.random() < 0.3
    marks: list[Mark] = []
    for number, text in enumerate(texts):
        y = top + number * gap * size
        for x, part, anchor in zip(ends, text, ("la", "ra", "ra"), strict=True):
            pen.text((x, y), part, font=font, fill=dark, anchor=anchor)
            begins = x if anchor == "la" else x - font.getlength(part)
            marks += _letters(font, part, "black", (begins, y + 0.15 * size, y + size))
        if ruled:
            pen.line(
                (left, y + size * gap * 0.94, left + used[0], y + size * gap * 0.94),
                fill=dark,
                width=max(1, size // 16),
            )
    return marks


def _extent(name: str, size: int, text: str) -> tuple[float, float]:
    left, top, right, bottom = fonts.font(name, size).getbbox(text or " ")
    return max(1.0, right - left), max(1.0, bottom - top)
