"""A whole run of the benchmark with a drive, where the card is played by the processor: its order, its table, its rows.

Store, routing, slots, readers, the drive's emulation and all arithmetic are real; the times mean nothing.
"""

import csv
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernels.experts.device.vram_slots import VramSlots
from kernels.experts.host.binding import Host
from kernels.experts.host.replay import Routing, hinted
from services.tools import bench_decode_disk, synth
from services.tools.bench_decode_disk import Way
from services.tools.cli import main
from services.tools.traces import generators

SIZES = generators.Sizes(layers=3, experts=32, top_k=6)  # of the small synthetic store


class Slots:
    def __init__(self, host: Host) -> None:
        self.host, self.vram = host, None

    def keep_in_vram(self, slots: int, device: torch.device) -> None:
        self.vram = VramSlots(self.host, slots, torch.device("cpu"))

    def close(self) -> None:
        if self.vram is not None:
            self.vram.close()


class Tokens:
    """By steps of the host alone."""

    def __init__(self, _store: object, _weights: object, _state: object, slots: Slots, way: Way, routing: Routing):
        self.slots, self.way, self.routing = slots, way, routing
        self.decoder = SimpleNamespace(late=0, close=lambda: None)
        self.x = torch.ones(1, slots.host.catalog.layout.latent)
        self.slowed_ns = 0.0

    def slow(self, layer_ns: float) -> None:
        self.slowed_ns = layer_ns

    def clear(self) -> None:
        pass

    def step(self, token: int, routing: Routing | None = None, nothing: bool = False) -> float:
        routing, begun = routing or self.routing, time.perf_counter()
        host, layers = self.slots.host, routing.layers
        for layer in range(layers):
            row = token * layers + layer
            if self.way.placement.guesses and layer + 1 < layers:
                host.prefetch(layer + 1, routing.guesses[0][row, : hinted(SIZES.top_k)])
            x = torch.full_like(self.x, torch.nan) if nothing else self.x
            time.sleep(self.slowed_ns / 1e9)
            host.step(layer, torch.from_numpy(routing.ids[row : row + 1]), torch.ones(1, SIZES.top_k), x)
        if self.slots.vram is not None:
            self.slots.vram.improve()
        return 1e3 * (time.perf_counter() - begun)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    embeddings = SimpleNamespace(read_through=lambda: None)
    for name, value in {
        "usable_device": lambda: torch.device("cpu"),
        "DeviceWeights": SimpleNamespace(load=lambda *_: SimpleNamespace(embeddings=embeddings)),
        "DevicePool": lambda *_, **more: None,
        "mid_dialog": lambda *_: None,
        "SharedSlots": Slots,
        "Tokens": Tokens,
        "generate": lambda name, tokens: generators.generate(name, tokens, SIZES),
    }.items():
        monkeypatch.setattr(bench_decode_disk, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("THIMBLE_COMMIT", "the same all along")  # what is done is of one commit
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)


WORDS = ["--share", "0.4,0.6", "--disk", "0.05,0.2", "--warm", "8", "--tokens", "4", "--threads", "1"]


def run(store: Path, *words: str) -> int:
    threads = torch.get_num_threads()
    try:
        return main(["bench", "decode-disk", str(store), *WORDS, *words])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("played")
def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, out, done = tmp_path / "store", tmp_path / "box.csv", tmp_path / "done"
    synth.synthesise(store, "small")
    words = ["--vram", "0.0005", "--out", str(out), "--done", str(done)]
    assert run(store, *words) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    count = {name: sum(row["name"] == name for row in rows) for name in {row["name"] for row in rows}}
    kinds = ("tok_s", "plan_error", "hidden", "hidden_of_missing")
    assert count == {
        **{f"decode.{kind}_ram{share}": 5 for kind in kinds for share in (40, 60)},
        **{f"decode.published_{kind}_ram{share}": 1 for kind in kinds[:2] for share in (40, 60)},
        "plan.error_max": 1,
    }
    assert all(float(row["value"]) <= 1 for row in rows if "hidden" in row["name"])
    [both] = {row["note"].split(", ")[2] for row in rows if "0.0005 GB of experts in graphics memory" in row["note"]}
    assert both == "ours"
    assert "% in 4 of ours, no prefetch" in rows[-1]["note"]
    assert "12 cases: " in rows[-1]["note"]
    errors = [float(row["value"]) for row in rows if "plan_error" in row["name"]]
    assert float(rows[-1]["value"]) == pytest.approx(max(errors), rel=1e-4)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("ours", "published"))]
    assert len(lines) == 12
    misses = np.array([float(line.split()[-7]) for line in lines[:4]])
    assert misses[:2].sum() > misses[2:].sum(), "more experts in RAM, fewer misses"

    assert run(store, *words) == 0  # all is done
    again = capsys.readouterr().out.splitlines()
    assert not [line for line in again if line.startswith(("ours", "published"))]
    last = list(csv.DictReader(out.read_text().splitlines()))[-1]
    assert last == rows[-1], "the plan's error is of all that is done"


@pytest.mark.usefixtures("played")
def test_the_stores_own_drive(tmp_path: Path) -> None:
    store, out = tmp_path / "store", tmp_path / "box.csv"
    synth.synthesise(store, "small")
    assert run(store, "--own", "--share", "0.6", "--out", str(out)) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    notes = [row["note"] for row in rows if row["name"].endswith("tok_s_ram60")]
    assert len(notes) == 3
    assert all("the drive of the store, " in note for note in notes)
    assert "own drive" in rows[-1]["note"]


@pytest.mark.usefixtures("played")
def test_a_home_pcs_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    store, out = tmp_path / "store", tmp_path / "box.csv"
    synth.synthesise(store, "small")
    monkeypatch.setattr(bench_decode_disk, "carried_ms", lambda *_: 60.0)
    assert run(store, "--home", "--share", "0.6", "--disk", "0.2", "--restart", "0.2", "--out", str(out)) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert [row["name"] for row in rows] == [
        *(f"decode.home_{kind}_ram60" for kind in ("tok_s", "plan_error", "hidden", "hidden_of_missing")),
        "restart.first_reply_over_steady",
        "plan.error_max",
    ]
    assert float(rows[4]["value"]) > 0
    assert "slowed to an RTX 5060 and not experts" in rows[0]["note"]
    [line] = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("ours, home pace")]
    assert line[3:5] == ["0.60", "0.2"]


@pytest.mark.usefixtures("played")
def test_a_run_that_has_no_time_says_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, out = tmp_path / "store", tmp_path / "box.csv"
    synth.synthesise(store, "small")
    assert run(store, "--minutes", "1", "--out", str(out)) == 0  # a first case is assumed to take two
    assert capsys.readouterr().out.count("left out: it may take 120 s") == 10
    assert not out.exists()
