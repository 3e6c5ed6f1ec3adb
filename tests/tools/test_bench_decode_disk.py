"""What `thimble bench decode-disk` says of given numbers, and that it says so where there is no GPU."""

import argparse
from pathlib import Path

import pytest
import torch

from services.tools.bench_decode_disk import OURS, THEIRS, Found, numbers, tell
from services.tools.cli import main
from services.tools.synth import synthesise


def test_the_hidden_share_is_of_the_time_that_reading_takes_one_by_one() -> None:
    assert Found(50.0, 10.0, 2.5, 10.0, 0).hidden == 0.75
    assert Found(50.0, 0.0, 0.0, 0.0, 0).hidden == 1.0
    assert numbers("0.24,0.5") == [0.24, 0.5]


def test_rows_name_the_method_and_the_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(trace="calibrated", threads=7, out=tmp_path / "a-machine.csv")
    for way in (OURS, THEIRS):
        tell(args, way, 0.24, 7.0, Found(40.0, 100.0, 4.0, 44.0, 0))
    rows = args.out.read_text().splitlines()
    assert [row.split(",")[3:5] for row in rows[1:]] == [
        ["decode.tok_s_ram24", "25"],
        ["decode.published_tok_s_ram24", "25"],
    ]
    assert "91%" in rows[1]
    assert "25.00" in capsys.readouterr().out


def test_a_machine_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    store = synthesise(tmp_path / "store", "small")
    assert main(["bench", "decode-disk", str(store.folder)]) == 2
    assert "bench misses" in capsys.readouterr().err
