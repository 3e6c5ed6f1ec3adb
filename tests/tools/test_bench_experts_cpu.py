"""The processor's expert benchmark: measures what it says, writes its rows, and nothing if the bits are wrong."""

import csv
from pathlib import Path

import pytest
import torch

from kernels.block import BlockLayout
from kernels.experts import reference
from services.tools import bench_experts_cpu
from services.tools.cli import main
from services.tools.synthetic_blocks import SyntheticBlocks

SMALL = BlockLayout(128, 256)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_experts_cpu, "LAYOUT", SMALL)
    monkeypatch.setattr(bench_experts_cpu, "WIDE", 6)


def test_rows_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "box.csv"
    words = ["bench", "experts-cpu", "--blocks", "30", "--rounds", "3", "--isa", "plain", "--threads", "1,2"]
    assert main([*words, "--out", str(out)]) == 0
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert len(rows) == 2 * 7
    assert {row["machine"] for row in rows} == {"box"}
    # How much longer two tokens take is a difference of two times: on a busy machine any, but more than -1.
    assert all(float(row["value"]) > -float(row["name"] == "experts_cpu.again") for row in rows)
    assert all("synthetic" in row["note"] and "plain" in row["note"] for row in rows)
    assert {row["name"].split(".")[0] for row in rows} == {"experts_cpu"}
    assert "plain, 2 threads" in capsys.readouterr().out


def test_the_bytes_of_a_step_follow_from_the_alive_set(tmp_path: Path) -> None:
    blocks = SyntheticBlocks(SMALL, 1, 30)
    catalog = blocks.write(tmp_path / "experts.bin")
    one = bench_experts_cpu.given(blocks, catalog, 1, seed=3)
    id = int(one.ids[0, 0])
    scales = float(catalog.up_scales[0, id]), float(catalog.down_scales[0, id])
    expert = reference.unpack_expert(bench_experts_cpu.read_block(catalog, id), SMALL, *scales)
    xq, _ = reference.quantise(one.x)
    h = (xq @ expert.up.T).clamp(min=0).square().float()
    alive = reference.quantise(h)[0][0] != 0
    assert torch.equal(bench_experts_cpu.alive_neurons(catalog, id, one.x), alive)
    at_least = bench_experts_cpu.TOP_K * SMALL.down_values
    assert at_least < one.read_bytes < at_least + bench_experts_cpu.TOP_K * (SMALL.block_bytes - SMALL.down_values)
    assert 0 < one.alive < one.touched < 1


def test_no_speed_of_wrong_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "MOST_EXPONENT", 3)  # another arithmetic than the library's
    with pytest.raises(RuntimeError, match="nothing was measured"):
        main(["bench", "experts-cpu", "--blocks", "30", "--rounds", "3", "--isa", "plain", "--threads", "1"])
