"""Scenes, their questions and their drawings: balanced, told apart, and as their seed says."""

import random
import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from services.engine.vision.grid import patch_grid
from services.tools.train_vision import lessons, painted, plain, scenes
from services.tools.train_vision.answers import is_right
from services.tools.train_vision.drawings import HELD_OUT, drawing, of_lesson, paint, size_for
from services.tools.train_vision.labels import COUNT, NONE, labels
from services.tools.train_vision.marks import CHARACTERS, SYMBOLS, Mark, on_patches
from services.tools.train_vision.scenes import ALIKE, COLOURS, SHAPES, Asked, Group, Scene
from services.tools.train_vision.shapes import tone

SEEDS = range(600)


@pytest.fixture(scope="module")
def asked() -> list[tuple[Scene, Asked]]:
    choice, found = random.Random(4), []
    for _ in range(4000):
        seen = scenes.scene(choice, choice.choice(scenes.KINDS))
        found.append((seen, scenes.ask(seen, choice.choice(scenes.topics(seen)), choice)))
    return found


def test_every_topic_colour_shape_and_count_is_asked_about_as_often(asked: list[tuple[Scene, Asked]]) -> None:
    assert {one.topic for _, one in asked} == set(scenes.TOPICS)
    for topic, classes in (("shape", SHAPES), ("colour", COLOURS), ("background", COLOURS)):
        told = Counter(one.answer.rstrip(".").lower() for _, one in asked if one.topic == topic)
        assert told.keys() == set(classes)
        assert min(told.values()) > 0.03 * told.total()
    yes = Counter(one.answer for seen, one in asked if one.topic == "whether" and seen.groups)
    assert 0.8 < yes["Yes."] / yes["No."] < 1.25
    singles = Counter(seen.groups[0].count for seen, _ in asked if len(seen.groups) == 1)
    assert set(singles) == {1, 2, 3, 4, 5}
    assert min(singles.values()) > 0.1 * singles.total()


def test_answers_follow_from_what_is_told(asked: list[tuple[Scene, Asked]]) -> None:
    for seen, one in asked[:500]:
        told = scenes.told(seen, random.Random(0))
        assert seen.background in told
        if one.topic in ("number", "word"):
            assert f" {seen.text} " in f"{told} "
            assert one.answer == f"It says {seen.text}."
        if one.topic in ("quantity", "price"):
            row = next(row for row in seen.rows if f" {row.item}" in f" {one.question.rstrip('?')}")
            assert one.answer == f"{row.quantity if one.topic == 'quantity' else row.price}."
            assert f"{row.item} {row.quantity} {row.price}" in told
        if one.topic == "whether":
            words = re.findall("[a-z]+", one.question)
            colours, shapes = ([word for word in words if word in known] for known in (COLOURS, SHAPES))
            there = [(g.colour, g.shape) for g in seen.groups]
            found = any((not colours or c in colours) and (not shapes or s in shapes) for c, s in there)
            assert (one.answer == "Yes.") == found


def test_held_out_words_and_ways_of_asking_are_never_taught() -> None:
    choice = random.Random(2)
    taught = {scenes.scene(choice, "word").text for _ in range(3000)}
    held_out = {scenes.scene(choice, "word", held_out=True).text for _ in range(300)}
    assert held_out
    assert not held_out & set(scenes.KNOWN_WORDS)
    assert len(held_out & taught) < 0.1 * len(held_out)  # made up by chance
    forms = scenes._TEXTS
    assert all(not {*forms["taught"][topic]} & {*forms["held out"][topic]} for topic in scenes.TOPICS)


def test_drawings_are_what_their_seed_says() -> None:
    first, again, other = drawing(7, (96, 64)), drawing(7, (96, 64)), drawing(HELD_OUT + 7, (96, 64))
    assert first.image.size == (96, 64)
    assert (first.image.tobytes(), first.asked) == (again.image.tobytes(), again.asked)
    assert first.image.tobytes() != other.image.tobytes()
    assert {drawing(seed).image.size for seed in range(6)} != {(96, 64)}


@pytest.mark.parametrize("colour", COLOURS)
def test_things_have_their_colour_and_their_size(colour: str) -> None:
    """Of one thing alone: how much of the paper is covered goes from next to nothing to most of it."""
    choice, covered, near = random.Random(1), [], []
    ground = scenes.unlike((colour,))[0]
    likely = np.array([tone(random.Random(n), colour) for n in range(200)])
    for _ in range(16):
        seen = Scene("things", ground, (Group(1, colour, "square"),))
        values = np.asarray(paint(seen, choice, (128, 128))[0]).reshape(-1, 3).astype(int)
        drawn = np.abs(values - values[0]).max(-1) > 40  # the first pixel is paper
        covered.append(drawn.mean())
        near.append(np.abs(np.median(values[drawn], 0) - likely).max(-1).min() < 30)
    assert sum(near) >= 14  # but for thin lines, whose edges are of the paper too
    assert max(covered) > 0.1
    assert 0.001 < min(covered) < 0.05


def test_colours_that_are_alike_are_never_in_one_picture(asked: list[tuple[Scene, Asked]]) -> None:
    for seen, _ in asked:
        colours = [seen.background, *(group.colour for group in seen.groups)]
        colours += [seen.ink] if seen.text else []
        assert len(set(colours)) == len(colours) or len(seen.groups) > 1
        assert not any(frozenset((a, b)) in ALIKE for a in colours for b in colours)


@pytest.mark.parametrize("grid", [(16, 16), (14, 18), (10, 24)])
def test_sizes_become_the_grid_that_was_asked_for(grid: tuple[int, int]) -> None:
    sizes = {size_for(random.Random(n), grid, 16, (200, 256)) for n in range(40)}
    assert len(sizes) > 5
    assert {patch_grid(*size, 16, 200, 256) for size in sizes} == {grid}


def test_labels_say_what_is_in_a_scene() -> None:
    told = labels(Scene("things", "white", (Group(3, "red", "circle"), Group(1, "blue", "star"))))
    assert len(told) == COUNT
    assert told[:2] == [0, COLOURS.index("white")]
    assert told[2 : 2 + len(SHAPES)] == [3, 0, 0, 0, 1, 0]
    assert sum(told[2 + len(SHAPES) : 2 + len(SHAPES) + len(COLOURS)]) == 4
    assert told[-1] == NONE
    text = [CHARACTERS[one] for one in labels(Scene("number", "grey", text="0417")) if one != NONE][2:]
    assert "".join(text) == "0417____"


def test_marks_are_where_things_and_letters_are() -> None:
    """Where a mark is said to be, the picture is not paper; of letters that are turned too."""
    choice = random.Random(7)
    for number in range(40):
        kind: scenes.Kind = choice.choice(("things", "number", "word"))
        seen = scenes.scene(choice, kind)
        image, marks = paint(seen, random.Random(number), (320, 240), plain=number % 2 == 0)
        values = np.asarray(image).astype(int)
        names = [mark.name for mark in marks]
        wanted = [group.shape for group in seen.groups for _ in range(group.count)] or list(seen.text)
        assert names == wanted
        for mark in marks:
            left, top, right, bottom = (max(0, round(v)) for v in (mark.left, mark.top, mark.right, mark.bottom))
            there = values[top : bottom + 1, left : right + 1].reshape(-1, 3)
            assert there.size
            assert np.ptp(there, 0).max() > 35 or np.abs(there - values[0, 0]).max() > 35
    seen = scenes.scene(choice, "invoice")
    marks = paint(seen, choice, (300, 300))[1]
    said = "".join(mark.name for mark in marks)
    assert all(row.item in said and row.price in said for row in seen.rows)


def test_patches_know_what_is_on_them() -> None:
    marks = [Mark(0, 0, 32, 32, "star", "red"), Mark(96, 40, 104, 46, "7", "blue"), Mark(104, 40, 112, 46, "b", "blue")]
    found = on_patches(marks, (256, 128), (8, 16))
    assert found.shape == (8, 16, 3)
    star = SYMBOLS.index("star")
    assert found[:2, :2, :2].tolist() == [[[star, star]] * 2] * 2
    assert (found[..., 2] == 1 + COLOURS.index("red")).sum() == 4
    assert found[2, 6].tolist() == [SYMBOLS.index("7"), SYMBOLS.index("b"), 1 + COLOURS.index("blue")]
    assert np.count_nonzero(found) == 12 + 3
    small = on_patches([Mark(250, 125, 251, 126, "x", "black")], (256, 128), (8, 16))
    assert small[7, 15].tolist() == [0, SYMBOLS.index("x"), 1 + COLOURS.index("black")]
    assert np.count_nonzero(on_patches([Mark(1, 1, 9, 9, ".", "black")], (256, 128), (8, 16))) == 0


def test_lessons_begin_with_easy_ones_and_go_on_when_those_are_known() -> None:
    nothing = lessons.weights([0.0] * 8, 0.0)
    assert [weight > 0 for weight in nothing] == [True] * 3 + [False] * 5
    assert all(lessons.weights([0.0] * 8, 0.5))
    known = lessons.weights([0.9] * 4 + [0.0] * 4, 0.0)
    assert [weight > 0 for weight in known] == [True] * 5 + [False] * 3
    assert [weight > 0 for weight in lessons.weights([0.0] * 8, 0.1, 2.0)] == [True] * 6 + [False] * 2
    assert known[0] < 0.5 * nothing[0]
    choice = random.Random(3)
    for lesson in lessons.LESSONS:
        drawn = [of_lesson(choice, lesson, (64, 64)) for _ in range(12)]
        assert {one.scene.kind for one in drawn} <= {lesson.kind, "nothing"}
        if lesson.name == "one":
            assert all(len(one.scene.groups) == 1 and one.scene.groups[0].count == 1 for one in drawn)
        if lesson.name == "digits":
            assert all(1 <= len(one.scene.text) <= 2 for one in drawn)
        if lesson.name == "figures":
            assert {len(one.scene.text) for one in drawn} == {3, 4, 5}


def test_paintings_are_made_by_other_code_and_are_what_their_seed_says() -> None:
    image, seen, one = painted.painting(3)
    assert image.tobytes() == painted.painting(3)[0].tobytes()
    assert image.size in painted.SIZES
    assert isinstance(image, Image.Image)
    topics = {painted.painting(seed)[2].topic for seed in range(40)}
    assert {"what", "shape", "colour", "count"} <= topics
    assert one.topic in scenes.topics(seen)
    assert {plain.drawing(seed)[1].topic for seed in range(60)} == set(plain.QUESTIONS)


@pytest.mark.parametrize(
    ("topic", "answer", "right", "wrong"),
    [
        ("what", "3 blue squares.", "There are three blue squares.", "There are two blue squares."),
        ("what", "3 blue squares.", "3 BLUE squares", "3 blue circles"),
        (
            "what",
            "1 red circle and 2 blue squares.",
            "2 blue squares and 1 red circle",
            "2 red squares and 1 blue circle",
        ),
        ("what", "The word house.", "A house.", "The word horse."),
        ("what", "Nothing.", "The picture is empty.", "1 red circle."),
        ("colour", "Grey.", "It is gray.", "Grey or black."),
        ("count", "4.", "I see four of them.", "5"),
        ("whether", "No.", "No, there is none.", "Yes."),
        ("number", "It says 0417.", "0417", "417"),
        ("number", "It says 12.", "It is 12.", "It is 12 or 13."),
        ("word", "It says house.", "The word is House.", "The word is houses."),
        ("price", "4.50.", "It costs 4.50 euros.", "It costs 4.5."),
        ("row", "It is tea.", "Tea", "Coffee"),
    ],
)
def test_an_answer_may_be_put_otherwise_but_not_say_otherwise(
    topic: scenes.Topic, answer: str, right: str, wrong: str
) -> None:
    asked = Asked(topic, "?", answer)
    assert is_right(asked, answer)
    assert is_right(asked, right)
    assert not is_right(asked, wrong)
