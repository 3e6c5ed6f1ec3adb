"""A dashboard's picture from Prometheus' answers, laid out as its JSON says and in the look of Grafana's dark theme.

Owns the layout and the drawing; it asks nobody. It is no Grafana: what panels show is right, how they show it is near.
"""

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from dashboard_panels import Panel
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator
from PIL import Image, ImageColor
from PIL.PngImagePlugin import PngInfo

WIDTH_PX, ROW_PX, HEAD_PX, GAP_PX = 1200, 34, 44, 6
COLUMNS, DPI, SHADES = 24, 100, 144
LETTER_PX, LINE_PX = 6.8, 17  # of text of size 9, about
PAGE, SURFACE, EDGE, GRID, TEXT, FAINT = "#111217", "#181b1f", "#2c2f36", "#2c2f36", "#d5d5e3", "#9a9aab"
PALETTE = ("#73BF69", "#F2CC0C", "#5794F2", "#FF780A", "#F2495C", "#B877D9", "#8AB8FF", "#37872D", "#C4162A", "#96D98D")
NAMED = {"green": "#56A64B", "red": "#E02F44", "orange": "#FF9830"}
SCALES = {  # of each unit: from which value on, divided by what, with which sign
    "s": ((1e-9, 1e-6, " µs"), (1e-3, 1e-3, " ms"), (1.0, 1.0, " s"), (60.0, 60.0, " min")),
    "bytes": ((0, 1, " B"), (1024, 1024, " KiB"), (1024**2, 1024**2, " MiB"), (1024**3, 1024**3, " GiB")),
    "Bps": ((0, 1, " B/s"), (1e3, 1e3, " kB/s"), (1e6, 1e6, " MB/s"), (1e9, 1e9, " GB/s")),
    "percentunit": ((0, 0.01, "%"),),
    "ops": ((0, 1, "/s"), (1e3, 1e3, "k/s")),
    "reqps": ((0, 1, "/s"),),
    "none": ((0, 1, ""),),
    "short": ((0, 1, ""), (1e3, 1e3, " K"), (1e6, 1e6, " Mil")),
    "celsius": ((0, 1, " °C"),),
    "watt": ((0, 1, " W"),),
}


@dataclass(frozen=True)
class Series:
    """`points`: seconds since 1970, and a number; NaN where there is none."""

    name: str
    points: Sequence[tuple[float, float]]

    @property
    def last(self) -> float:
        return next((value for _, value in reversed(self.points) if math.isfinite(value)), math.nan)


def shown(value: float, unit: str, decimals: int | None = None) -> str:
    """With its unit, as Grafana writes it. Raises KeyError for a unit that it does not know."""
    scales = SCALES[unit]
    if not math.isfinite(value):
        return "–"
    _, divisor, sign = next((one for one in reversed(scales) if abs(value) >= one[0]), scales[0])
    number = value / divisor
    if decimals is None:
        whole = abs(number - round(number)) < 1e-6 or abs(number) >= 100
        decimals = 0 if whole else 1 if abs(number) >= 10 else 2
    return f"{number:.{decimals}f}{sign}"


def size_px(panels: Sequence[Panel]) -> tuple[int, int]:
    return WIDTH_PX, HEAD_PX + ROW_PX * max(panel.y + panel.h for panel in panels) + GAP_PX


def draw(title: str, panels: Sequence[Panel], data: Mapping[str, Sequence[Series]], file: Path, note: str) -> list[str]:
    """Write the PNG; the titles of the panels that show no data. `data` is by the panel's title and place
    (`key`). The titles are in the PNG's text, so that a picture of other panels is known."""
    width, height = size_px(panels)
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, facecolor=PAGE)
    canvas = _Canvas(figure, width, height)
    canvas.write(GAP_PX + 8, HEAD_PX / 2, title, size=14, weight="bold", va="center")
    canvas.write(width - GAP_PX - 8, HEAD_PX / 2, note, size=9, color=FAINT, ha="right", va="center")
    empty = []
    for panel in panels:
        if panel.kind == "row":
            canvas.write(GAP_PX + 8, canvas.top(panel) + ROW_PX / 2, f"⌄  {panel.title}", weight="bold", va="center")
            continue
        series = [one for one in data.get(key(panel), ()) if math.isfinite(one.last)]
        canvas.frame(panel)
        if panel.kind == "text":
            _text(canvas, panel)
        elif series:
            {"stat": _stat, "timeseries": _timeseries, "bargauge": _bars}[panel.kind](canvas, panel, series)
        else:
            empty.append(panel.title)
            x, y, w, h = canvas.inside(panel)
            canvas.write(x + w / 2, y + h / 2, "No data", size=12, color=FAINT, ha="center", va="center")
    content = io.BytesIO()
    FigureCanvasAgg(figure).print_png(content)
    about = PngInfo()
    about.add_text("panels", titles(panels))
    _few_colours(Image.open(content).convert("RGB"), panels).save(file, optimize=True, pnginfo=about)
    return empty


def _few_colours(image: Image.Image, panels: Sequence[Panel]) -> Image.Image:
    """Enough for flat surfaces and lines, and a third of the size. Those that tell series apart stay what they are."""
    kept = {*PALETTE, *NAMED.values()}.union(*((panel.colours or {}).values() for panel in panels))
    found = image.quantize(SHADES, dither=Image.Dither.NONE).getpalette() or []
    palette = Image.new("P", (1, 1))
    palette.putpalette(found[: 3 * SHADES] + [part for name in sorted(kept) for part in ImageColor.getrgb(name)])
    return image.quantize(palette=palette, dither=Image.Dither.NONE)


def key(panel: Panel) -> str:
    """Two panels may have one title, but not one place."""
    return f"{panel.title} {panel.x},{panel.y}"


def titles(panels: Sequence[Panel]) -> str:
    return "\n".join(f"{panel.x},{panel.y} {panel.title}" for panel in panels)


class _Canvas:
    """Pixels from the top left."""

    def __init__(self, figure: Figure, width: int, height: int) -> None:
        self.figure, self._width, self._height = figure, width, height

    def top(self, panel: Panel) -> float:
        return HEAD_PX + ROW_PX * panel.y

    def box(self, panel: Panel) -> tuple[float, float, float, float]:
        column = (self._width - GAP_PX) / COLUMNS
        return (
            GAP_PX + column * panel.x,
            self.top(panel) + GAP_PX / 2,
            column * panel.w - GAP_PX,
            ROW_PX * panel.h - GAP_PX,
        )

    def inside(self, panel: Panel) -> tuple[float, float, float, float]:
        """Below the title."""
        x, y, w, h = self.box(panel)
        return x + 8, y + 28, w - 16, h - 34

    def frame(self, panel: Panel) -> None:
        x, y, w, h = self.box(panel)
        self.fill(x, y, w, h, SURFACE, edge=EDGE)
        title = textwrap.shorten(panel.title, int((w - 12) / LETTER_PX), placeholder="…")
        self.write(x + 8, y + 15, title, weight="bold", va="center")

    def fill(self, x: float, y: float, w: float, h: float, colour: str, edge: str = "none") -> None:
        corner = (x / self._width, 1 - (y + h) / self._height)
        size = (w / self._width, h / self._height)
        self.figure.add_artist(Rectangle(corner, *size, facecolor=colour, edgecolor=edge, linewidth=0.8, zorder=-1))

    def write(self, x: float, y: float, text: str, size: float = 9, color: str = TEXT, **options: str) -> None:
        self.figure.text(x / self._width, 1 - y / self._height, text, fontsize=size, color=color, **options)

    def axes(self, x: float, y: float, w: float, h: float) -> Axes:
        place = (x / self._width, 1 - (y + h) / self._height, w / self._width, h / self._height)
        return self.figure.add_axes(place, facecolor=SURFACE)


def _colour(panel: Panel, series: Series, number: int) -> str:
    """As the dashboard says, else the next of the palette."""
    return (panel.colours or {}).get(series.name, PALETTE[number % len(PALETTE)])


def _stat(canvas: _Canvas, panel: Panel, series: Sequence[Series]) -> None:
    """Each series' last value, with its course behind it."""
    x, y, w, h = canvas.inside(panel)
    w /= len(series)
    for number, one in enumerate(series):
        left = x + number * w
        text, colour = (panel.words or {}).get(one.last, (shown(one.last, panel.unit, panel.decimals), ""))
        colour = colour or next((its for begin, its in reversed(panel.steps) if one.last >= begin), "green")
        colour = NAMED[colour]
        if panel.on_background:
            canvas.fill(left + 2, y, w - 4, h, colour)
            canvas.write(left + w / 2, y + 16, one.name, ha="center", va="center", color="white")
            canvas.write(left + w / 2, y + h / 2 + 10, text, size=17, ha="center", va="center", color="white")
            continue
        axes = canvas.axes(left, y + h / 2, w, h / 2)
        times, values = zip(*one.points, strict=True)
        axes.fill_between(times, values, color=colour, alpha=0.2, linewidth=0)
        axes.plot(times, values, color=colour, linewidth=1)
        axes.set_xlim(times[0], max(times[-1], times[0] + 1))
        axes.set_ylim(0, 1.1 * max((v for v in values if math.isfinite(v)), default=0) or 1)
        axes.axis("off")
        canvas.write(left + w / 2, y + h / 3, text, size=19, ha="center", va="center", color=colour, weight="bold")


def _timeseries(canvas: _Canvas, panel: Panel, series: Sequence[Series]) -> None:
    x, y, w, h = canvas.inside(panel)
    colours = [_colour(panel, one, number) for number, one in enumerate(series)]
    legend_px = _legend(canvas, x, y + h, w, [one.name for one in series], colours)
    axes = canvas.axes(x + 58, y + 4, w - 82, h - legend_px - 26)
    begin, end = (edge(time for one in series for time, _ in one.points) for edge in (min, max))
    highest = 0.0
    for (times, values, below), colour in zip(_courses(panel, series), colours, strict=True):
        axes.plot(times, values, color=colour, linewidth=1.3)
        axes.fill_between(times, values, below, color=colour, alpha=panel.fill, linewidth=0)
        highest = max(highest, *(v for v in values if math.isfinite(v)))
    axes.set_xlim(begin, max(end, begin + 1))
    axes.set_ylim(panel.low or 0.0, panel.high if panel.high is not None else 1.12 * highest or 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(4 if panel.w < 12 else 7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")))
    axes.yaxis.set_major_locator(FixedLocator(_round_ticks(axes.get_ylim()[1], panel.unit)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, panel.unit, panel.decimals)))
    axes.tick_params(colors=FAINT, labelsize=8, length=0, pad=5)
    axes.grid(color=GRID, linewidth=0.7)
    axes.spines[:].set_visible(False)


def _round_ticks(high: float, unit: str) -> list[float]:
    """Round in the unit in which they are written."""
    divisor = next((its for begin, its, _ in reversed(SCALES[unit]) if high >= begin), SCALES[unit][0][1])
    return [tick * divisor for tick in MaxNLocator(5).tick_values(0, high / divisor) if tick * divisor <= high]


Course = tuple[Sequence[float], Sequence[float], Sequence[float]]


def _courses(panel: Panel, series: Sequence[Series]) -> Iterator[Course]:
    """Of each series: times, upper and lower edge. In a stack, what is not there has no height."""
    if not panel.stacked:
        for one in series:
            times, values = zip(*one.points, strict=True)
            yield times, values, [0.0] * len(times)
        return
    times = sorted({time for one in series for time, _ in one.points})
    below = [0.0] * len(times)
    for one in series:
        there = {time: value for time, value in one.points if math.isfinite(value)}
        above = [low + there.get(time, 0.0) for time, low in zip(times, below, strict=True)]
        yield times, above, below
        below = above


def _legend(canvas: _Canvas, x: float, bottom: float, w: float, names: Sequence[str], colours: Sequence[str]) -> int:
    """From left to right in as many lines as it takes; their height."""
    places: list[tuple[int, float]] = []
    line, at = 0, 0.0
    for name in names:
        wide = 26 + LETTER_PX * len(name)
        if at and at + wide > w:
            line, at = line + 1, 0.0
        places.append((line, at))
        at += wide
    for name, colour, (on, at) in zip(names, colours, places, strict=True):
        middle = bottom - LINE_PX * (line - on) - LINE_PX / 2
        canvas.fill(x + at, middle - 2, 12, 4, colour)
        canvas.write(x + at + 17, middle, name, size=8.5, va="center")
    return LINE_PX * (line + 1)


def _bars(canvas: _Canvas, panel: Panel, series: Sequence[Series]) -> None:
    """One below the other, in the order of the answer."""
    x, y, w, h = canvas.inside(panel)
    high = max(one.last for one in series) or 1.0
    name_px = 14 + LETTER_PX * max(len(one.name) for one in series)
    bar_px, step = w - name_px - 72, h / len(series)
    for number, one in enumerate(series):
        colour, middle, thick = _colour(panel, one, number), y + step * (number + 0.5), min(26.0, 0.7 * step)
        canvas.write(x + name_px - 8, middle, one.name, ha="right", va="center")
        canvas.fill(x + name_px, middle - thick / 2, bar_px, thick, GRID)
        canvas.fill(x + name_px, middle - thick / 2, max(1.0, bar_px * one.last / high), thick, colour)
        text = shown(one.last, panel.unit, panel.decimals)
        canvas.write(x + w, middle, text, color=colour, weight="bold", ha="right", va="center")


def _text(canvas: _Canvas, panel: Panel) -> None:
    """Markdown's words: emphasis is left out, its lists are kept."""
    x, y, w, _ = canvas.inside(panel)
    letters, at = int(w / LETTER_PX * 1.08), y + 4
    for paragraph in panel.markdown.splitlines():
        words = paragraph.replace("**", "").replace("*", "").replace("`", "")
        bullet = words.startswith("- ")
        for number, line in enumerate(textwrap.wrap(words.removeprefix("- "), letters - 2 * bullet) or [""]):
            if bullet and not number:
                canvas.write(x, at, "•", va="top")
            canvas.write(x + 11 * bullet, at, line, size=8.5, va="top")
            at += LINE_PX - 2 if line else 6
        at += 2
