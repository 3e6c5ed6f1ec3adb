"""A token's timeline from handmade events: layers are found, the trace reads back, the picture shows what took long."""

import itertools
import json
from pathlib import Path

import pytest
from PIL import ImageColor

from services.engine.model_config import Layer
from services.tools import timeline
from services.tools.gpu_events import Event, parse

LAYERS: tuple[Layer, ...] = ("mamba", "moe", "attention", "moe")
MAMBA = ["in_proj_kernel", "update_kernel", "linear_kernel"]
ATTENTION = ["qkv_kernel", "attend_kernel", "merge_kernel", "linear_kernel"]
MOE = [
    *(
        "linear_kernel",
        "choose_kernel",
        "choose_kernel",
        "post_kernel",
        "linear_kernel",
        "linear_kernel",
        "wait_kernel",
    ),
    *("quantise_kernel", "up_kernel", "alive_kernel", "down_kernel", "finish_kernel", "wait_kernel", "combine_kernel"),
    "linear_kernel",
]
HEAD = ["linear_kernel", "best_kernel", "greedy_kernel"]
TOKEN = MAMBA + MOE + ATTENTION + MOE + HEAD
SLOW = {"up_kernel": 100.0, "linear_kernel": 20.0, "wait_kernel": 60.0}


def token(names: list[str] = TOKEN) -> list[Event]:
    made, at = [], 0.0
    for name in names:
        made.append(Event(name, "kernel", at, SLOW.get(name, 5.0), 7))
        if name == "post_kernel":
            made.append(Event("Memcpy HtoD", "copy", at + 5, 80.0, 13))
        at = made[-1].end_us + 1 if made[-1].kind == "kernel" else made[-2].end_us + 1
    return made


def kernels(events: list[Event]) -> list[Event]:
    return [event for event in events if event.kind == "kernel"]


def test_every_kernel_belongs_to_its_layer() -> None:
    labels = timeline.layer_of(kernels(token()), LAYERS)
    expected = [("layer 0 mamba", MAMBA), ("layer 1 moe", MOE), ("layer 2 attention", ATTENTION), ("layer 3 moe", MOE)]
    assert labels == [name for name, part in expected for _ in part] + ["head"] * 3


@pytest.mark.parametrize(
    "names", [TOKEN[: len(MAMBA) + 4], MAMBA, [name for name in TOKEN if name != "merge_kernel"], []]
)
def test_other_kernels_are_no_token_of_the_model(names: list[str]) -> None:
    with pytest.raises(ValueError, match="are not one token of this model"):
        timeline.layer_of(kernels(token(names)), LAYERS)


def test_layers_follow_each_other() -> None:
    events = kernels(token())
    found = timeline.spans(events, timeline.layer_of(events, LAYERS))
    assert [name for name, _, _ in found] == [*(f"layer {i} {layer}" for i, layer in enumerate(LAYERS)), "head"]
    assert found[0][1] == 0.0
    assert found[-1][2] == max(event.end_us for event in events)
    assert all(before[2] < after[1] for before, after in itertools.pairwise(found))


def test_the_trace_holds_every_event_once(tmp_path: Path) -> None:
    events = token()
    timeline.write_trace(tmp_path / "token.json", events, LAYERS, "synthetic, one token")
    trace = json.loads((tmp_path / "token.json").read_text())
    complete = [entry for entry in trace["traceEvents"] if entry["ph"] == "X"]
    assert len(complete) == len(events) + len(LAYERS) + 1
    tracks = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert set(tracks.values()) == {"layers", "kernels, stream 7", "copies, stream 13"}
    up = [entry for entry in complete if entry["name"] == "up_kernel"]
    assert [entry["args"]["layer"] for entry in up] == ["layer 1 moe", "layer 3 moe"]
    assert {entry["dur"] for entry in up} == {100.0}
    assert trace["traceEvents"][0]["args"]["name"] == "synthetic, one token"
    assert parse(trace) == [], "tracks of ours are no events of a GPU"


def test_the_picture_shows_what_took_long() -> None:
    """Pixels of a colour are as its time is."""
    events = token()
    image = timeline.draw(events, LAYERS, "synthetic")
    assert image.size[0] == timeline.WIDTH + 2 * timeline.MARGIN
    counts = {colour: count for count, colour in image.getcolors(1 << 24) or ()}

    def pixels(name: str, height: int) -> float:
        return counts[ImageColor.getrgb(timeline.COLOURS[name])] / height

    def us(name: str) -> float:
        return sum(event.duration_us for event in events if timeline.part(event) == name)

    for name in ("experts", "hand-off and waiting"):
        ratio = pixels(name, timeline.KERNELS_HEIGHT) / pixels("dense", timeline.KERNELS_HEIGHT)
        assert ratio == pytest.approx(us(name) / us("dense"), rel=0.1)
    assert pixels("copy", timeline.COPIES_HEIGHT) / pixels("experts", timeline.KERNELS_HEIGHT) == pytest.approx(
        us("copy") / us("experts"), rel=0.1
    )
    layers = {name for name in ("mamba", "attention", "moe", "head") if pixels(name, timeline.LAYERS_HEIGHT) > 10}
    assert layers == {"mamba", "attention", "moe", "head"}


def test_the_table_begins_with_the_longest() -> None:
    lines = timeline.table(token()).splitlines()
    assert lines[1].split()[:4] == ["wait_kernel", "hand-off", "and", "waiting"]
    assert lines[1].split()[4:7] == ["4", "240.0", "60.00"]
    assert len(lines) == 1 + len({*TOKEN, "copy"})
