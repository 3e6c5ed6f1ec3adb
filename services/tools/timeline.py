"""A token's timeline: which layer each kernel belongs to, as a Chrome trace, as a picture, as a table by kernel.

Owns names, layout and colours; the events come from gpu_events.py. A layer is told by its kernels: the convolution's
projection begins a Mamba layer, query, key and value an attention layer, and each ends with the linear that adds to the
residual stream.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from services.engine.model_config import Layer
from services.tools.gpu_events import Event
from services.tools.token_parts import EXPERTS, HANDOFF, kernel

LINEAR = "linear_kernel"
LAST_STATE: dict[Layer, str] = {"mamba": "update_kernel", "attention": "merge_kernel", "moe": "combine_kernel"}
HEAD = "head"

COLOURS = {
    "dense": "#4477aa",
    "experts": "#ee7733",
    "hand-off and waiting": "#bbbbbb",
    "copy": "#228833",
    "mamba": "#ccddee",
    "attention": "#ddaa33",
    "moe": "#f4c7a5",
    HEAD: "#aa4499",
}
ROWS, WIDTH, MARGIN = 8, 2400, 12  # pixels
LAYERS_HEIGHT, KERNELS_HEIGHT, COPIES_HEIGHT, GAP = 22, 44, 14, 22
LEGEND_HEIGHT = 60


def layer_of(events: Sequence[Event], layers: Sequence[Layer]) -> list[str]:
    """For each kernel of one token, in order, `layer 7 moe` or `head`. Raises ValueError if the kernels are not those
    of these layers."""
    names = [kernel(event.name) for event in events]
    labels: list[str] = []
    at = 0
    for number, layer in enumerate(layers):
        end = at
        while end < len(names) and names[end] != LAST_STATE[layer]:
            end += 1
        while end < len(names) and names[end] != LINEAR:
            end += 1
        if end >= len(names):
            raise ValueError(
                f"{len(names)} kernels are not one token of this model: layer {number}, {layer}, is not there"
            )
        labels += [f"layer {number} {layer}"] * (end + 1 - at)
        at = end + 1
    return labels + [HEAD] * (len(names) - at)


def part(event: Event) -> str:
    """Which colour it has."""
    if event.kind == "copy":
        return "copy"
    name = kernel(event.name)
    return "experts" if name in EXPERTS else "hand-off and waiting" if name in HANDOFF else "dense"


def spans(events: Sequence[Event], labels: Sequence[str]) -> list[tuple[str, float, float]]:
    """Name, beginning and end in microseconds of each layer, in order."""
    found: list[tuple[str, float, float]] = []
    for event, label in zip(events, labels, strict=True):
        if found and found[-1][0] == label:
            found[-1] = label, found[-1][1], event.end_us
        else:
            found.append((label, event.start_us, event.end_us))
    return found


def chrome_trace(events: Sequence[Event], layers: Sequence[Layer], title: str) -> dict[str, Any]:
    """For chrome://tracing or Perfetto: a track of layers, one of kernels for each stream, one of copies."""
    kernels = [event for event in events if event.kind == "kernel"]
    labels = layer_of(kernels, layers)
    tracks: dict[str, int] = {"layers": 0}
    entries: list[dict[str, Any]] = []

    def add(track: str, name: str, start_us: float, duration_us: float, **more: object) -> None:
        thread = tracks.setdefault(track, len(tracks))
        entry = {"ph": "X", "pid": 0, "tid": thread, "name": name, "ts": start_us, "dur": duration_us, "args": more}
        entries.append(entry)

    for name, begin, end in spans(kernels, labels):
        add("layers", name, begin, end - begin)
    for event, label in zip(kernels, labels, strict=True):
        add(f"kernels, stream {event.stream}", kernel(event.name), event.start_us, event.duration_us, layer=label)
    for event in events:
        if event.kind == "copy":
            add(f"copies, stream {event.stream}", event.name, event.start_us, event.duration_us)
    names = [
        {"ph": "M", "pid": 0, "tid": thread, "name": "thread_name", "args": {"name": track}}
        for track, thread in tracks.items()
    ]
    process = {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}
    return {"traceEvents": [process, *names, *entries], "displayTimeUnit": "ms"}


def write_trace(path: Path, events: Sequence[Event], layers: Sequence[Layer], title: str) -> None:
    path.write_text(json.dumps(chrome_trace(events, layers, title)), encoding="utf-8")


def draw(events: Sequence[Event], layers: Sequence[Layer], title: str) -> Image.Image:
    """The token in ROWS rows of equal time: layers above, kernels in the middle, copies below."""
    kernels = [event for event in events if event.kind == "kernel"]
    labels = layer_of(kernels, layers)
    row_us = max(event.end_us for event in events) / ROWS
    row_height = LAYERS_HEIGHT + KERNELS_HEIGHT + COPIES_HEIGHT + GAP
    image = Image.new("RGB", (WIDTH + 2 * MARGIN, LEGEND_HEIGHT + ROWS * row_height + MARGIN), "white")
    pen = ImageDraw.Draw(image)

    def box(begin_us: float, end_us: float, top: int, height: int, colour: str, text: str = "") -> None:
        """In every row that it touches."""
        for row in range(int(begin_us // row_us), min(ROWS - 1, int(end_us // row_us)) + 1):
            left = MARGIN + max(0.0, begin_us / row_us - row) * WIDTH
            right = MARGIN + min(1.0, end_us / row_us - row) * WIDTH
            upper = LEGEND_HEIGHT + row * row_height + top
            pen.rectangle((left, upper, max(left, right - 1), upper + height - 1), COLOURS[colour])
            if text and right - left > 7 * len(text):
                pen.text((left + 3, upper + 4), text, "black")

    for name, begin, end in spans(kernels, labels):
        box(begin, end, 0, LAYERS_HEIGHT, name.rpartition(" ")[2], name.removeprefix("layer "))
    for event in events:
        top = LAYERS_HEIGHT + (KERNELS_HEIGHT if event.kind == "copy" else 0)
        height = COPIES_HEIGHT if event.kind == "copy" else KERNELS_HEIGHT
        box(event.start_us, event.end_us, top, height, part(event))
    for row in range(ROWS):
        bottom = LEGEND_HEIGHT + (row + 1) * row_height - GAP
        pen.text((MARGIN, bottom + 4), f"{row * row_us / 1e3:.2f} ms", "#666666")
    pen.text((MARGIN, MARGIN), title, "black")
    left = MARGIN
    for name, colour in COLOURS.items():
        pen.rectangle((left, MARGIN + 20, left + 12, MARGIN + 32), colour)
        pen.text((left + 18, MARGIN + 20), name, "black")
        left += 40 + 7 * len(name)
    return image


def table(events: Sequence[Event]) -> str:
    """By kernel, the longest together first: how often, microseconds together and each, share of the whole time."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        times[kernel(event.name), part(event)].append(event.duration_us)
    whole = max(event.end_us for event in events)
    lines = [f"{'kernel':<36}{'part':<22}{'times':>7}{'us':>11}{'us each':>10}{'of token':>10}"]
    for (name, of_part), each in sorted(times.items(), key=lambda item: -sum(item[1])):
        total = sum(each)
        lines.append(
            f"{name:<36}{of_part:<22}{len(each):>7}{total:>11.1f}{total / len(each):>10.2f}{total / whole:>10.1%}"
        )
    return "\n".join(lines)
