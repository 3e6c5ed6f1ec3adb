"""What `thimble bench decode-disk` says of given numbers, and that it says so where there is no GPU."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from kernels.experts.host.replay import Routing
from services.engine.gpu.ledger import dense_bytes, stored_layout
from services.tools.amounts import amounts
from services.tools.bench_decode_disk import carried_ms, cases, plan_ms, without_misses
from services.tools.cli import main
from services.tools.disk_report import Found, tell
from services.tools.disk_tokens import HIT_EXPERTS, HOME, OURS, PLAIN, THEIRS, VRAM, Tokens, few_experts
from services.tools.drive_reads import DriveReads
from services.tools.measure import Reads
from services.tools.synth import synthesise
from services.tools.traces.generators import generate

READS = Reads(4e5, 1e5, 5e4)
DRIVE = DriveReads(needed=100.0, missing=80.0, block_ms=0.4)  # 40 ms of needed reading, 32 of it for missing blocks
FOUND = Found(5.0, 20.0, READS, planned_ms=27.0, token_ms=30.0, drive=DRIVE, waited_ms=4.0, late=0)


def test_hidden_is_what_a_token_does_not_take_longer_for_its_reads() -> None:
    assert FOUND.hidden == pytest.approx(1 - 10 / 40)
    assert FOUND.hidden_of_missing == pytest.approx(1 - 10 / 32), "guesses that came in time left out"
    assert FOUND.most_hidden == 0.5, "20 ms without reads, behind which 40 do not go"
    assert FOUND.error == pytest.approx(0.1)
    nothing = replace(FOUND, drive=DriveReads(0.0, 0.0, 0.4), token_ms=19.0)
    assert nothing.hidden == nothing.hidden_of_missing == nothing.most_hidden == 1.0
    assert amounts("0.24,0.5") == [0.24, 0.5]


def test_rows_name_the_method_and_the_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(trace="calibrated", threads=7, out=tmp_path / "a-machine.csv", vram=0.0, own=False)
    for way in (OURS, THEIRS):
        tell(args, way, 0.24, 7.0, replace(FOUND, token_ms=40.0))
    rows = args.out.read_text().splitlines()
    assert [row.split(",")[3:5] for row in rows[1:]] == [
        ["decode.tok_s_ram24", "25"],
        ["decode.plan_error_ram24", "0.325"],
        ["decode.hidden_ram24", "0.5"],
        ["decode.hidden_of_missing_ram24", "0.375"],
        ["decode.published_tok_s_ram24", "25"],
        ["decode.published_plan_error_ram24", "0.325"],
    ]
    assert "80.0 misses a token, 20.0 ms without any, of which 5.0 not experts, 40.0 ms of needed reading" in rows[1]
    assert "25.00" in capsys.readouterr().out


def test_needed_blocks_are_those_that_were_named() -> None:
    before = {"misses": 10, "demand_read_bytes": 800, "prefetch_useful": 5, "prefetch_wasted": 0}
    after = {"misses": 30, "demand_read_bytes": 2000, "prefetch_useful": 15, "prefetch_wasted": 9}
    found = DriveReads.between(before, after, block_bytes=100, gb_s=1e-4, tokens=2)
    assert (found.needed, found.missing, found.block_ms) == (12 / 2 + 10 / 2, 10.0, 1.0)


def test_a_machine_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    store = synthesise(tmp_path / "store", "small")
    assert main(["bench", "decode-disk", str(store.folder)]) == 2
    assert "bench misses" in capsys.readouterr().err


def test_quick_is_the_two_ends() -> None:
    args = argparse.Namespace(home=False, quick=True, share=[0.24, 0.33], disk=[7.0, 12.0])
    assert cases(args) == [(0.24, 7.0, PLAIN), (0.24, 7.0, THEIRS), (0.33, 12.0, PLAIN), (0.33, 12.0, THEIRS)]
    args = argparse.Namespace(home=False, quick=False, share=[0.24, 0.33], disk=[7.0, 12.0], vram=0.0)
    whole = cases(args)
    assert len(whole) == 10
    assert all(way is PLAIN for _, _, way in whole[:4]), "first what the plan is held against"
    assert [case[:2] for case in whole if case[2] is OURS] == [(0.24, 7.0), (0.33, 7.0), (0.24, 12.0), (0.33, 12.0)]
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
    for idle_ms in (0.0, 5.0, 30.0):
        assert plan_ms(routing, 2, 20480, idle_ms, 20.0, free) == pytest.approx(20.0, rel=1e-3)
    slow = Reads(4e5, 0.0, 0.0)
    found = [plan_ms(routing, 2, 5000, idle_ms, 20.0, slow) for idle_ms in (0.0, 5.0, 15.0)]
    assert 25.0 < found[0] < found[1] < found[2], "a drive reads beside experts, not beside all that is computed"


class Steady:
    """5 ms that are not experts, 15 that are."""

    routing, slowed_ns, not_finite = generate("calibrated", 1), 0.0, False

    def step(self, token: int, routing: Routing, nothing: bool = False) -> float:
        assert nothing or not self.not_finite, "a state that is not finite is cleared before it is used"
        self.not_finite = nothing
        return 5.0 + routing.layers * self.slowed_ns / 1e6 + (0.0 if nothing else 15.0)

    def clear(self) -> None:
        self.not_finite = False

    def slow(self, layer_ns: float) -> None:
        self.slowed_ns = layer_ns


@pytest.mark.parametrize(("carried_ms", "idle_ms"), [(0.0, 5.0), (3.0, 5.0), (19.4, 19.4)])
def test_what_is_not_experts_takes_as_long_as_asked(carried_ms: float, idle_ms: float) -> None:
    found = without_misses(cast(Tokens, Steady()), carried_ms)
    assert found == (pytest.approx(idle_ms), pytest.approx(idle_ms + 15.0))


def test_a_home_pcs_pace(tmp_path: Path) -> None:
    args = argparse.Namespace(home=True, quick=False, share=[0.24, 0.36], disk=[7.0, 12.0], vram=0.0, hints=0)
    assert cases(args) == [(share, disk, HOME) for share in (0.24, 0.36) for disk in (7.0, 12.0)]
    args.hints = 14
    assert {case[2].placement.hints for case in cases(args)} == {14}
    store = synthesise(tmp_path / "store", "small")
    dense = dense_bytes(store.config, stored_layout(store.folder))
    handoffs_ms = 0.02 * len(store.config.moe_layers)
    assert carried_ms(store.folder, store.config) == pytest.approx(dense / (0.85 * 448e9) * 1e3 + handoffs_ms)
