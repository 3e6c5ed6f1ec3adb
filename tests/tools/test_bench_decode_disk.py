"""What `thimble bench decode-disk` says of given numbers, and that it says so where there is no GPU."""

import argparse
from pathlib import Path

import pytest
import torch

from services.tools.bench_decode_disk import (
    HIT_EXPERTS,
    OURS,
    PLAIN,
    THEIRS,
    VRAM,
    Found,
    cases,
    few_experts,
    numbers,
    plan_ms,
    tell,
)
from services.tools.cli import main
from services.tools.measure import Reads
from services.tools.synth import synthesise
from services.tools.traces.generators import generate


def test_the_hidden_share_is_of_the_time_that_reading_takes_one_by_one() -> None:
    reads = Reads(1.0, 1.0, 1.0)
    assert Found(20.0, reads, 45.0, 50.0, 10.0, 2.5, 10.0, 0).hidden == 0.75
    assert Found(20.0, reads, 45.0, 50.0, 0.0, 0.0, 0.0, 0).hidden == 1.0
    assert Found(20.0, reads, 45.0, 50.0, 0.0, 0.0, 0.0, 0).error == pytest.approx(0.1)
    assert numbers("0.24,0.5") == [0.24, 0.5]


def test_rows_name_the_method_and_the_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(trace="calibrated", threads=7, out=tmp_path / "a-machine.csv", vram=0.0)
    for way in (OURS, THEIRS):
        tell(args, way, 0.24, 7.0, Found(20.0, Reads(4e5, 1e5, 5e4), 39.0, 40.0, 100.0, 4.0, 44.0, 0))
    rows = args.out.read_text().splitlines()
    assert [row.split(",")[3:5] for row in rows[1:]] == [
        ["decode.tok_s_ram24", "25"],
        ["decode.hidden_ram24", "0.909091"],
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


def test_quick_is_the_two_ends() -> None:
    args = argparse.Namespace(quick=True, share=[0.24, 0.33], disk=[7.0, 12.0])
    assert cases(args) == [(0.24, 7.0, PLAIN), (0.24, 7.0, THEIRS), (0.33, 12.0, PLAIN), (0.33, 12.0, THEIRS)]
    args = argparse.Namespace(quick=False, share=[0.24, 0.33], disk=[7.0, 12.0], vram=0.0)
    whole = cases(args)
    assert len(whole) == 8
    args.vram = 4.0
    assert [case for case in cases(args) if case not in whole] == [(0.24, 7.0, VRAM), (0.33, 7.0, VRAM)]
    assert len([case for case in whole if case[2] is PLAIN]) == 4, "the plan is checked in four"


def test_tokens_that_miss_nothing_name_few_experts() -> None:
    few = few_experts(generate("calibrated", 2), 9)
    assert len(few.layer) == 9 * few.layers
    top_k = few.ids.shape[1]
    begin = few.ids[: HIT_EXPERTS * few.layers]
    assert sorted(set(begin[few.layer[: len(begin)] == 7].ravel().tolist())) == list(range(HIT_EXPERTS * top_k))
    assert few.ids.max() < HIT_EXPERTS * top_k
    assert all(len(set(row)) == top_k for row in few.ids.tolist())


def test_a_plan_without_misses_is_what_was_measured() -> None:
    routing = generate("calibrated", 6)
    free = Reads(0.0, 0.0, 0.0)
    for expert_ns in (1e3, 1e9):
        assert plan_ms(routing, 2, 20480, 20.0, expert_ns, free) == pytest.approx(20.0, rel=1e-3)
    assert plan_ms(routing, 2, 5000, 20.0, 1e4, Reads(4e5, 0.0, 0.0)) > 25.0
