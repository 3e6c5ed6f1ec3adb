"""The family's sizes: published counts, the ties, the extremes, and how several pictures share a prompt."""

import math

import pytest

from services.engine.vision.grid import patch_grid, share, tokens

FULL, NORMAL = 13312, 4096


@pytest.mark.parametrize(
    ("width", "height", "full", "normal"),
    [
        (224, 224, 256, 256),
        (64, 32, 276, 276),
        (48, 32, 276, 276),
        (512, 512, 256, 256),
        (1000, 500, 512, 512),
        (500, 1000, 512, 512),
        (1024, 1024, 1024, 1024),
        (1536, 1536, 2304, 1024),
        (1920, 1080, 2040, None),
        (640, 480, 300, 300),
        (800, 600, 475, 475),
        (1240, 1754, 2145, 988),
        (1275, 1650, 2080, 1008),
        (1654, 2339, 3264, 988),
        (2480, 3508, 3264, 988),
        (1700, 2200, 3315, 1008),
        (3840, 2160, 3311, 1008),
        (4032, 3024, 3300, 1008),
        (1, 1, 256, 256),
        (10000, 10, 401, 401),
    ],
)
def test_published_counts(width: int, height: int, full: int, normal: int | None) -> None:
    assert tokens(patch_grid(width, height, 16, 1024, FULL)) == full
    if normal is not None:
        assert tokens(patch_grid(width, height, 16, 1024, NORMAL)) == normal


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (48, 32, (24, 46)),
        (10000, 10, (2, 802)),
        (1240, 1754, (110, 78)),
        (512, 512, (32, 32)),  # 32.5 goes to 32
        (528, 512, (32, 34)),  # 33.5 goes to 34
        (496, 512, (32, 32)),  # 31.5 goes to 32 too
    ],
)
def test_grids(width: int, height: int, grid: tuple[int, int]) -> None:
    assert patch_grid(width, height, 16, 1024, FULL) == grid


def test_rounding_half_away_from_zero_would_be_seen() -> None:
    """The control: the usual way to round gives another grid for the most common size."""
    away = [math.floor(512 / 16 + 0.5 + 0.5)] * 2
    assert away == [33, 33]
    assert patch_grid(512, 512, 16, 1024, FULL) != (34, 34)


@pytest.mark.parametrize("most", [1024, 1100, 4096, 13312])
def test_no_size_breaks_the_rule(most: int) -> None:
    for width in [*range(1, 40), 997, 4096, 16384]:
        for height in (1, 2, 15, 16, 17, 31, 997, 16384):
            rows, columns = patch_grid(width, height, 16, 1024, most)
            assert rows >= 2 <= columns
            assert rows % 2 == columns % 2 == 0
            # Only what is one patch wide cannot be made smaller.
            assert rows * columns <= most or min(rows, columns) == 2, (width, height)


def _three(context_tokens: int, text_tokens: int) -> list[int]:
    room = context_tokens - text_tokens - 4
    return [tokens(grid) for grid in share([(1920, 1080)] * 3, 16, 1024, [FULL] * 3, room)]


def test_three_pictures_share_a_short_context() -> None:
    assert _three(4096, 10) == [1344] * 3
    assert _three(4096, 0) == [1323] * 3
    assert _three(16384, 0) == [2040] * 3


def test_a_small_picture_keeps_its_size_beside_a_large_one() -> None:
    small, large = share([(512, 512), (3000, 3000)], 16, 1024, [FULL] * 2, 2000)
    assert small == (32, 32)
    assert tokens(large) + 256 <= 2000
    assert tokens(large) > 1200


def test_no_picture_gets_less_than_the_least() -> None:
    assert share([(1024, 1024)] * 4, 16, 1024, [FULL] * 4, 10) == [(32, 32)] * 4


def test_each_has_its_own_limit() -> None:
    low, normal, high = share([(2480, 3508)] * 3, 16, 1024, [1024, 4096, 13312], 100_000)
    assert [tokens(grid) for grid in (normal, high)] == [988, 3264]
    assert tokens(low) <= 256
