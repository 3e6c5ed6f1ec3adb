"""The cost of metrics is measured with the engine's own scheduler; a counter that takes long shows."""

import csv
import time
from pathlib import Path

import pytest

from services.engine.experts.store import Store
from services.engine.metrics import Metrics
from services.tools import cli


def cost_us(store: Store, out: Path) -> float:
    words = ["bench", "metrics", str(store.folder), "--tokens", "30", "--turns", "3", "--out", str(out)]
    assert cli.main(words) == 0
    with out.open(encoding="utf-8") as file:
        rows = {row["name"]: row for row in csv.DictReader(file)}
    assert float(rows["metrics.share_of_token"]["value"]) == pytest.approx(
        float(rows["metrics.us_per_token"]["value"]) / 19_700, rel=1e-3
    )
    return float(rows["metrics.us_per_token"]["value"])


def test_it_is_measured(demo_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cost = cost_us(demo_store, tmp_path / "machine.csv")
    assert 1 < cost < 10_000

    def slow(self: Metrics) -> None:
        end_s = time.thread_time() + 0.005
        while time.thread_time() < end_s:
            pass

    monkeypatch.setattr(Metrics, "glance", slow)
    assert cost_us(demo_store, tmp_path / "slower.csv") > cost + 5_000, "twice in each step"
