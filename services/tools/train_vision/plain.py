"""The first of three examinations: shapes of one colour to be counted and named, numbers of four digits to be read, all
small and on light paper. Taught once, by themselves, now only asked about, so that scores of all towers compare.

A picture is all that its seed says.
"""

import math
import random

from PIL import Image, ImageDraw, ImageFont

from services.tools.train_vision.scenes import Asked, Topic

SIDE = 96
COLOURS = {
    "red": (220, 30, 30),
    "green": (20, 150, 50),
    "blue": (30, 60, 220),
    "yellow": (240, 200, 0),
    "orange": (245, 130, 20),
    "black": (15, 15, 15),
}
SHAPES = ("circle", "square", "triangle", "cross")
MOST = 5
DIGITS = 4
QUESTIONS: dict[Topic, str] = {
    "what": "What is in the picture?",
    "shape": "Which shape is in the picture?",
    "colour": "Which colour is in the picture?",
    "count": "How many things are in the picture?",
    "number": "Which number is in the picture?",
}


def drawing(seed: int) -> tuple[Image.Image, Asked]:
    choice = random.Random(seed)
    topic = choice.choice(list(QUESTIONS))
    paper = tuple(choice.randrange(235, 256) for _ in range(3))
    image = Image.new("RGB", (SIDE, SIDE), paper)
    pen = ImageDraw.Draw(image)
    if topic == "number":
        number = f"{choice.randrange(10**DIGITS):0{DIGITS}d}"
        _write(pen, choice, number)
        return image, Asked(topic, QUESTIONS[topic], f"{number}.")
    colour, shape, count = choice.choice(list(COLOURS)), choice.choice(SHAPES), choice.randrange(1, MOST + 1)
    for x, y, radius in _places(choice, count):
        _draw(pen, shape, x, y, radius, COLOURS[colour])
    name = shape if count == 1 else f"{shape}es" if shape == "cross" else f"{shape}s"
    answers = {"what": f"{count} {colour} {name}.", "shape": f"{shape}.", "colour": f"{colour}.", "count": f"{count}."}
    return image, Asked(topic, QUESTIONS[topic], answers[topic])


def _places(choice: random.Random, count: int) -> list[tuple[int, int, int]]:
    """Centres and sizes of things that do not touch each other or the edge."""
    found: list[tuple[int, int, int]] = []
    while len(found) < count:
        radius = choice.randrange(7, 13)
        x, y = (choice.randrange(radius + 2, SIDE - radius - 2) for _ in range(2))
        if all(math.dist((x, y), other[:2]) > 1.5 * (radius + other[2]) for other in found):
            found.append((x, y, radius))
        elif choice.random() < 0.02:
            found.clear()
    return found


def _draw(pen: ImageDraw.ImageDraw, shape: str, x: int, y: int, r: int, colour: tuple[int, int, int]) -> None:
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "square":
        pen.rectangle((x - r + 1, y - r + 1, x + r - 1, y + r - 1), fill=colour)
    elif shape == "triangle":
        pen.polygon(((x, y - r), (x - r, y + r), (x + r, y + r)), fill=colour)
    else:
        for dx, dy in ((r, max(2, r // 3)), (max(2, r // 3), r)):
            pen.rectangle((x - dx, y - dy, x + dx, y + dy), fill=colour)


def _write(pen: ImageDraw.ImageDraw, choice: random.Random, number: str) -> None:
    font = ImageFont.load_default(choice.randrange(22, 32))
    left, top, right, bottom = pen.textbbox((0, 0), number, font=font)
    at = (choice.randrange(2, SIDE - 2 - int(right - left)), choice.randrange(2, SIDE - 2 - int(bottom - top)))
    ink = choice.choice([name for name in COLOURS if name != "yellow"])  # which can hardly be read on paper
    pen.text((at[0] - left, at[1] - top), number, font=font, fill=COLOURS[ink])
