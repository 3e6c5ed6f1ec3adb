"""Pictures of dashboards: each kind of panel that occurs is drawn where its JSON says; what has no data is told."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from dashboard_panels import KINDS, Panel, UnknownPanel, panels_of
from dashboard_picture import SCALES, Series, draw, key, shown, size_px, titles
from panels import DASHBOARDS
from PIL import Image

PICTURES = DASHBOARDS[0].parents[1] / "pictures"
MOST_BYTES = 150_000


def made_up(panels: list[Panel]) -> dict[str, list[Series]]:
    """A minute of two series for every query; the second has gaps."""
    found = {}
    for panel in panels:
        found[key(panel)] = [
            Series(f"{target.legend} {name}", [(1e9 + t, factor * (2 + math.sin(t / 9))) for t in range(0, 60, step)])
            for target in panel.targets
            for name, factor, step in (("one", 0.2, 2), ("two", 0.1, 4))
        ]
    return found


def drawn(panels: list[Panel], data: dict[str, list[Series]], file: Path) -> tuple[Image.Image, list[str]]:
    empty = draw("Title", panels, data, file, "note")
    return Image.open(file).convert("RGB"), empty


def part(image: Image.Image, panel: Panel) -> list[tuple[int, tuple[int, int, int]]]:
    """Colours inside of a panel's place, and how often."""
    width, height = image.size
    column, row = width / 24, 34
    left, top = int(column * panel.x + 12), 44 + row * panel.y + 8
    inside = (left, top, int(column * (panel.x + panel.w) - 12), min(height, 44 + row * (panel.y + panel.h) - 8))
    return image.crop(inside).getcolors(1 << 20) or []


def coloured(image: Image.Image, panel: Panel) -> int:
    """Pixels that are more than grey: only data is."""
    return sum(count for count, colour in part(image, panel) if max(colour) - min(colour) > 40)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_is_drawn_in_its_place(dashboard: Path, tmp_path: Path) -> None:
    panels = panels_of(dashboard)
    image, empty = drawn(panels, made_up(panels), tmp_path / "full.png")
    assert empty == []
    assert image.size == size_px(panels)
    bare, without = drawn(panels, {}, tmp_path / "bare.png")
    asking = [panel for panel in panels if panel.targets]
    assert without == [panel.title for panel in asking]
    assert [panel.title for panel in asking if coloured(image, panel) < 50] == []
    assert [panel.title for panel in panels if coloured(bare, panel)] == []
    assert [panel.title for panel in panels if len(part(image, panel)) < 3] == [], "at least words"


def test_every_kind_and_unit_occurs() -> None:
    """Else something here is not tried by the dashboards."""
    panels = [panel for dashboard in DASHBOARDS for panel in panels_of(dashboard)]
    assert {panel.kind for panel in panels} == set(KINDS)
    assert {panel.unit for panel in panels} == set(SCALES)
    assert {panel.stacked for panel in panels} == {True, False}


@pytest.mark.parametrize(
    "change",
    [{"type": "heatmap"}, {"fieldConfig": {"defaults": {"custom": {"drawStyle": "bars"}}}}],
    ids=lambda change: next(iter(change)),
)
def test_what_cannot_be_drawn_is_refused(change: dict[str, object], tmp_path: Path) -> None:
    content = json.loads(DASHBOARDS[0].read_text())
    content["panels"][1] |= change
    (tmp_path / "other.json").write_text(json.dumps(content))
    with pytest.raises(UnknownPanel, match=content["panels"][1]["title"]):
        panels_of(tmp_path / "other.json")


def test_numbers_that_are_none_are_no_data(tmp_path: Path) -> None:
    panel = Panel("timeseries", "Panel", 0, 0, 12, 8)
    nothing = Series("a", [(0.0, math.nan), (1.0, math.nan)])
    assert drawn([panel], {key(panel): [nothing]}, tmp_path / "a.png")[1] == ["Panel"]
    assert drawn([panel], {key(panel): [nothing, Series("b", [(0.0, 1.0)])]}, tmp_path / "b.png")[1] == []


def test_stacked_series_stand_on_each_other(tmp_path: Path) -> None:
    """Two of one height: stacked, the upper one's colour is above the lower one's; else one hides the other."""
    level = [(float(t), 1.0) for t in range(10)]
    data = [Series("low", level), Series("high", level)]
    colours = {"low": "#ff0000", "high": "#00ff00"}
    alone = Panel("timeseries", "Panel", 0, 0, 24, 12, colours=colours, fill=1.0, high=2.0)
    images = [
        drawn([panel], {key(panel): data}, tmp_path / "x.png")[0]
        for panel in (alone, dataclasses.replace(alone, stacked=True))
    ]
    reds = [sum(count for count, (r, g, b) in part(image, alone) if r > 200 > 90 > g + b) for image in images]
    assert reds[1] > 10 * reds[0]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0042, "s", "4.20 ms"),
        (75, "s", "1.25 min"),
        (0.5, "percentunit", "50%"),
        (3 * 1024**3, "bytes", "3 GiB"),
        (2.5e9, "Bps", "2.50 GB/s"),
        (0, "s", "0 µs"),
        (math.nan, "s", "–"),
    ],
)
def test_numbers_are_written_with_their_units(value: float, unit: str, text: str) -> None:
    assert shown(value, unit) == text


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_the_pictures_are_of_these_panels(dashboard: Path) -> None:
    picture = PICTURES / f"{dashboard.stem}.png"
    panels = panels_of(dashboard)
    assert picture.stat().st_size <= MOST_BYTES
    with Image.open(picture) as image:
        again = "python tests/e2e/draw_dashboards.py grafana/pictures"
        assert image.size == size_px(panels), again
        assert image.text["panels"] == titles(panels), again
