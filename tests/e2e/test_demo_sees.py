"""The committed demo, as `make up` serves it, says what is in a picture. More of pictures is in test_pictures.py."""

import csv
from pathlib import Path

import pytest
from PIL import Image, ImageDraw, ImageFont
from running import Running

from services.tools.cli import main
from services.tools.train_vision.answers import is_right
from services.tools.train_vision.exam import ask
from services.tools.train_vision.plain import COLOURS, QUESTIONS, SIDE
from services.tools.train_vision.scenes import Asked, Topic

RED, BLUE, GREEN = (COLOURS[name] for name in ("red", "blue", "green"))


def paper() -> tuple[Image.Image, ImageDraw.ImageDraw]:
    image = Image.new("RGB", (SIDE, SIDE), (250, 250, 250))
    return image, ImageDraw.Draw(image)


def red_circle() -> Image.Image:
    image, pen = paper()
    pen.ellipse((38, 34, 58, 54), fill=RED)
    return image


def blue_squares() -> Image.Image:
    image, pen = paper()
    for x, y in ((12, 14), (60, 20), (34, 62)):
        pen.rectangle((x, y, x + 18, y + 18), fill=BLUE)
    return image


def number() -> Image.Image:
    image, pen = paper()
    pen.text((14, 30), "2947", font=ImageFont.load_default(26), fill=GREEN)
    return image


def shown(stack: Running, image: Image.Image, topic: Topic, answer: str) -> tuple[bool, str]:
    said = ask(f"{stack.url}/v1", "demo", image, QUESTIONS[topic])
    return is_right(Asked(topic, QUESTIONS[topic], answer), said), said


@pytest.mark.parametrize(
    ("image", "answers"),
    [
        (red_circle(), {"what": "1 red circle.", "shape": "circle.", "colour": "red.", "count": "1."}),
        (blue_squares(), {"what": "3 blue squares.", "shape": "square.", "colour": "blue.", "count": "3."}),
        (number(), {"number": "2947."}),
    ],
    ids=["red circle", "blue squares", "number"],
)
def test_a_picture_gets_the_right_answer(stack: Running, image: Image.Image, answers: dict[Topic, str]) -> None:
    for topic, answer in answers.items():
        is_so, said = shown(stack, image, topic, answer)
        assert is_so, (QUESTIONS[topic], said)


@pytest.mark.parametrize(
    ("topic", "of_the_squares", "of_the_circle"),
    [("what", "3 blue squares.", "1 red circle."), ("colour", "blue.", "red.")],
)
def test_the_answer_is_the_pictures_and_not_the_questions(
    stack: Running, topic: Topic, of_the_squares: str, of_the_circle: str
) -> None:
    """The control: of another picture the same question gets that one's answer, and the first one's is wrong of it."""
    assert shown(stack, blue_squares(), topic, of_the_squares)[0]
    assert not shown(stack, blue_squares(), topic, of_the_circle)[0]


def test_large_pictures_and_other_shapes_are_seen_too(stack: Running) -> None:
    """What is not as trained on is made as small; the demo's limits hold, not the family's."""
    is_so, said = shown(stack, red_circle().resize((960, 960)), "colour", "red.")
    assert is_so, said


def test_the_examination_scores_and_records(stack: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "here.csv"
    words = ["see", f"{stack.url}/v1", "demo", "--sets", "plain", "--drawings", "12", "--first", "77"]
    words += ["--record", str(record)]
    assert main(words) == 0
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    right, asked = (sum(int(line[column]) for line in told[:-1]) for column in (2, 4))
    assert asked == 12
    assert right >= 10
    assert told[-1][:5] == ["plain", "all", str(right), "of", "12"]
    rows = list(csv.DictReader(record.read_text().splitlines()))
    assert [row["name"] for row in rows] == ["demo.vision"] * len(told)
    assert [row["note"].split()[2].rstrip(":") for row in rows] == [line[1] for line in told]
    assert {line[1] for line in told} <= {*QUESTIONS, "all"}
    assert [f"{float(row['value']):.1f}" for row in rows] == [line[5] for line in told]
