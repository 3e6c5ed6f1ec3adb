"""A whole run of the decode benchmark where GPU and clock are scripted: its order, its table, its figures.

The store, the trace, the host's slots, the published variants and all arithmetic are real.
"""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from kernels.experts.device.times import Times
from services.engine.gpu.ledger import MIB
from services.tools import bench_decode, synth
from services.tools.bench_experts import PUBLISHED
from services.tools.cli import main
from services.tools.expert_rig import Method
from services.tools.token_parts import Sums

SPLIT_MS, BATCH_MS, BEST_MS = 20.0, 8.0, 55.0  # a split token, what a further row adds, the best published variant
BEST = PUBLISHED[1]


class Rig:
    """Knows the times of every method; what it is asked for is written down."""

    log: ClassVar[list[str]] = []

    def __init__(self, weights: object, states: list[object], slots: object, method: Method, share: float, _: object):
        self.rows, self.method, self.late, self.steps = len(states), method, 0, 0
        assert share == pytest.approx(6 * 40 / 100)
        self.log.append(f"open {method.name} x{self.rows}")

    def step(self, token: int) -> float:
        self.steps += 1
        if self.method.name == "split":
            return SPLIT_MS + BATCH_MS * (self.rows - 1)
        return BEST_MS if self.method == BEST else BEST_MS + 5.0

    def times(self) -> Times:
        return Times(self.steps * 3, self.steps * 3 * 2, 0, 0, 0, 0, 0, 0)

    def gpu_experts(self, before: Times) -> float:
        return 2.0

    def sums(self, first: int, tokens: int, nothing: bool = False) -> tuple[Sums, float]:
        return (Sums(4.0, 0.5, 0.2, 0.2, 0.2) if nothing else Sums(4.0, 7.0, 0.2, 0.3, 8.0)), 0.0

    def close(self) -> None:
        self.log.append(f"close {self.method.name}")


class Peaks:
    def __init__(self, free_mib: int) -> None:
        self.free_mib, self.asked = free_mib, 0

    def __enter__(self) -> "Peaks":
        return self

    def __exit__(self, *_: object) -> None: ...

    def peak_bytes(self) -> int:
        self.asked += 1
        return (7000 + self.asked) * MIB


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    @contextmanager
    def sequences(_: object, count: int) -> Iterator[list[object]]:
        yield [SimpleNamespace(ids=[0] * 63) for _ in range(count)]

    rates = SimpleNamespace(copy=lambda: 50.0, together=lambda: (60.0, 40.0))
    embeddings = SimpleNamespace(read_through=lambda: None)
    weights = SimpleNamespace(load=lambda *_: SimpleNamespace(embeddings=embeddings))
    monkeypatch.setattr(Rig, "log", [])
    for name, value in {
        "DecodeRig": Rig,
        "Ballast": Peaks,
        "SharedSlots": lambda host: SimpleNamespace(host=host, close=lambda: None),
        "ReadRates": lambda slots: rates,
        "DeviceWeights": weights,
        "usable_device": lambda: None,
        "measure_copy": lambda device: 1000.0,
        "default_threads": lambda: 9,
        "FEW_THREADS": 2,
    }.items():
        monkeypatch.setattr(bench_decode, name, value)
    monkeypatch.setattr(bench_decode.Bench, "sequences", sequences)
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("max_memory_reserved", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 6000 * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1700 * MIB, 2000 * MIB))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return Rig.log


def test_a_whole_run(
    tmp_path: Path, scripted: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    synth.synthesise(tmp_path / "store", "small")
    words = ["bench", "decode", str(tmp_path / "store"), "--resident", "16", "--tokens", "6", "--batches", "1,3"]
    threads = torch.get_num_threads()
    assert main([*words, "--free-mib", "2000", "--context", "64", "--out", str(tmp_path / "box.csv")]) == 0
    torch.set_num_threads(threads)

    opened = [entry for entry in scripted if entry.startswith("open")]
    assert opened[0] == "open split x1"
    assert opened[1:-6] == [f"open {method.name} x1" for method in PUBLISHED], "each variant is tried"
    assert opened[-6] == f"open {BEST.name} x1"
    assert opened[-5:-2] == ["open split x1", "open split x2", "open split x4"], "tokens of one sequence"
    assert opened[-2:] == ["open split x3", "open split x1"], "batches; few threads"
    assert len(scripted) == 2 * len(opened), "all are closed"

    printed = capsys.readouterr().out
    assert "synthetic, replayed routing (16 experts a layer, all hits" in printed
    assert "ballast to 2000 MiB" in printed
    assert "most graphics memory, batch 1: 7002 MiB by the driver = tensors 6000" in printed
    rows = list(csv.DictReader((tmp_path / "box.csv").read_text().splitlines()))
    assert all(row["note"].startswith("synthetic, ") and torch.__version__ in row["note"] for row in rows)

    def value(name: str, of: str = "") -> float:
        (found,) = [float(row["value"]) for row in rows if row["name"] == f"decode.{name}" and of in row["note"]]
        return found

    assert value("tok_s", "batch 1, 9 threads") == pytest.approx(50.0)
    assert value("tok_s", "batch 1, 2 threads") == pytest.approx(50.0)
    assert value("tok_s", "batch 3, 9 threads") == pytest.approx(3e3 / 36, rel=1e-4)
    assert value("ours_over_published", "9 threads") == pytest.approx(2.75)
    assert value("published_tok_s", BEST.name) == pytest.approx(1e3 / BEST_MS, rel=1e-4)
    assert value("peak_vram_gb", "batch 1") == pytest.approx(7002 / 1024, rel=1e-4)
    assert value("peak_vram_gb", "batch 3") == pytest.approx(7004 / 1024, rel=1e-4)
    assert [value("union", f"{rows} of one sequence") for rows in (1, 2, 4)] == pytest.approx([0.02, 0.014, 0.011])
    assert value("ours_cpu_ms") == pytest.approx(7.8)
    assert value("ours_rest_ms") == pytest.approx(20 - 4 - 7.1 - 7.8 - 0.6)
    assert value("over_floor", "9 threads") == pytest.approx(20 / value("floor_ms"), rel=1e-4)
