"""What `thimble bench vision` counts and says, without a card: operations, the floor, the figures it writes."""

import csv
from argparse import Namespace
from pathlib import Path

import plain_kernels
import pytest
import torch

from services.engine.vision.device import DeviceTower
from services.engine.vision.weights import VisionWeights
from services.tools import bench_vision, synthetic_vision
from services.tools.bench_vision import SMALL, Floor, Reading, operations
from services.tools.cli import main
from services.tools.synthetic_vision import REAL


@pytest.mark.parametrize(("grid", "tera"), [((32, 32), 1.6), ((76, 52), 7.97), ((128, 104), 47.2)], ids=str)
def test_operations_are_those_of_the_published_plan(grid: tuple[int, int], tera: float) -> None:
    assert operations(REAL, grid) / 1e12 == pytest.approx(tera, rel=0.02)


def test_a_picture_is_of_even_sides_and_fits_the_largest() -> None:
    for name, grid in bench_vision.PICTURES.items():
        tokens = grid[0] * grid[1] // 4
        assert grid[0] % 2 == grid[1] % 2 == 0
        assert REAL.least_patches <= 4 * tokens <= REAL.most_patches
        assert not name.endswith("tokens") or tokens >= int(name.split()[1])


def test_the_floor_is_what_takes_longer() -> None:
    floor = Floor(link_gb_s=20.0, matmul_tflops=100.0, weight_bytes=1_680_000_000)
    copy_s, compute_s = floor.seconds(REAL, (32, 32))
    assert copy_s == pytest.approx(0.084)
    assert compute_s == pytest.approx(0.016, rel=0.02)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> VisionWeights:
    return synthetic_vision.write(tmp_path_factory.mktemp("vision") / "vision.safetensors", SMALL)


def test_a_picture_is_read_and_timed(small: VisionWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_kernels.use(monkeypatch)
    tower = DeviceTower(small, torch.device("cpu"))
    reading = bench_vision._read(tower, "small", (30, 34), repeats=2)
    tower.close()
    assert reading.same
    assert len(reading.seconds) == 2
    assert 0 < reading.median_s <= max(reading.seconds)


@pytest.mark.parametrize("same", [True, False])
def test_figures_say_what_they_are_of(
    same: bool, small: VisionWeights, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    readings = [Reading("as 1047 tokens", (84, 50), where, [0.2, 0.1, 0.3], 0.25, same) for where in (False, True)]
    args = Namespace(out=tmp_path / "card.csv", free_mib=8151)
    floor = Floor(20.0, 100.0, 1_680_000_000)
    assert bench_vision._report(args, small, "synthetic", readings, floor, 400 << 20) == (0 if same else 1)
    assert ("OTHER BITS" in capsys.readouterr().out) != same
    rows = list(csv.DictReader(args.out.read_text().splitlines()))
    assert [row["name"] for row in rows] == ["vision.seconds", "vision.floor_share"] * 2 + ["vision.peak_mib"]
    assert float(rows[0]["value"]) == 0.2
    assert rows[0]["note"].startswith("1050 tokens (as 1047 tokens), synthetic weights in file, ballast to 8151 MiB")
    assert "weights in RAM" in rows[2]["note"]
    assert float(rows[-1]["value"]) == 400


def test_without_a_card_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for words in (["--synthetic"], ["--check"]):
        assert main(["bench", "vision", *words]) == 2
        assert "needs a CUDA device" in capsys.readouterr().err
    assert main(["bench", "vision"]) == 2
    assert "give a STORE, or --synthetic" in capsys.readouterr().err
