"""The planner: it gives the published figures from their own constants, and refuses what does not fit."""

import argparse
import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kernels.experts.host.replay import Clock
from services.engine.experts.store import Store
from services.engine.gpu import ledger as vram
from services.tools import forecast, measure, plan
from services.tools.cli import main
from services.tools.forecast import Published, decode, first_token, hit_rate, made_up, ours, published, upgrades
from services.tools.hardware import CARDS, PCIE_GB_S, Card, box
from services.tools.predict import GB, SUPER, Method, layer_of
from services.tools.ram_ledger import PlanError, RamWanted, ram_ledger
from services.tools.synthetic_shapes import SUPER as MODEL
from services.tools.synthetic_shapes import dense_layout
from services.tools.traces.generators import generate
from services.tools.traces.kept import without_hottest
from services.tools.traces.steady import steady

PUBLISHED = box(CARDS["rtx5060"], 34.4, dram_gb_s=65, disk_gb_s=12)  # PCIe 28 GB/s, DDR5, a Gen5 drive
ALL_GB = SUPER.blocks * SUPER.block_bytes / GB
GIVEN = ["plan", "--gpu", "rtx5060", "--ram", "32", "--dram", "60-70", "--disk", "7-12"]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Less routing to replay: no figure of it is a prediction."""
    monkeypatch.setattr(forecast, "TOKENS", 70)
    monkeypatch.setattr(forecast, "WARM_TOKENS", 40)
    made_up.cache_clear()
    yield
    made_up.cache_clear()


@pytest.mark.parametrize(
    ("method", "share", "tok_s"),
    [
        (Method.COPY, 0.24, 6.6),
        (Method.GROUPS, 0.24, 7.3),
        (Method.GROUPS, 0.24, 7.6),
        (Method.GROUPS, 20 / ALL_GB, 8.2),
    ],
    ids=["copy all", "16-groups, low", "16-groups, high", "20 GB cache"],
)
def test_the_published_figures(method: Method, share: float, tok_s: float) -> None:
    """One set of constants for all."""
    assert decode(SUPER, PUBLISHED, method, hit_rate(share)).tok_s == pytest.approx(tok_s, rel=0.10)


def test_the_published_figures_beside_the_formulas() -> None:
    found = published()
    assert [one.said for one in found] == [(6.6, 6.6), (7.3, 7.6), (8.2, 8.2)]
    assert max(one.error for one in found) < 0.10
    assert Published("x", (7.0, 8.0), 7.5).error == 0
    assert Published("x", (7.0, 8.0), 8.8).error == pytest.approx(0.1)
    assert Published("x", (7.0, 8.0), 6.3).error == pytest.approx(0.1)


def test_the_published_figures_can_be_missed() -> None:
    """With a link or a disk of another generation, or another hit rate, none would come out."""
    for changed in (replace(PUBLISHED, pcie_gb_s=PCIE_GB_S[4, 8]), replace(PUBLISHED, disk_gb_s=5)):
        assert decode(SUPER, changed, Method.COPY, hit_rate(0.24)).tok_s != pytest.approx(6.6, rel=0.10)
    assert decode(SUPER, PUBLISHED, Method.COPY, 0.6).tok_s != pytest.approx(6.6, rel=0.10)


def test_the_published_first_token() -> None:
    """About 5 s for 40 tokens."""
    assert first_token(SUPER, PUBLISHED, 40, 20 / ALL_GB, ours=False).total_s == pytest.approx(5.0, rel=0.10)


def test_a_first_token_is_its_chunks() -> None:
    """Of a chunk the slowest counts, beside what is done between the experts; smaller chunks move experts again."""
    one = first_token(SUPER, PUBLISHED, 2048, 0.3)
    assert one.total_s == pytest.approx(max(one.disk_s, one.pcie_s, one.compute_s) + one.dense_s)
    assert one.experts_s == one.disk_s
    four = first_token(SUPER, PUBLISHED, 8192, 0.3)
    assert four.chunks == 4
    assert four.experts_s == pytest.approx(4 * one.experts_s)
    assert four.dense_s > 4 * one.dense_s, "later tokens look back at more"
    assert first_token(SUPER, PUBLISHED, 8192, 0.3, chunk=1024).disk_s == pytest.approx(2 * four.disk_s, rel=0.01)
    there = first_token(SUPER, PUBLISHED, 2048, 1.0)
    assert (there.disk_s, there.experts_s) == (0, there.pcie_s)
    apart = first_token(SUPER, PUBLISHED, 2048, 0.3, ours=False)
    assert apart.experts_s == pytest.approx(one.disk_s + one.pcie_s + one.compute_s)


def test_how_much_of_a_prompt_is_read_at_once() -> None:
    """As the ledger has room: less of it, then none."""
    dense = dense_layout(MODEL)
    asked = vram.Wanted(1, 16384)
    need = vram.ledger(MODEL, dense, asked).total_bytes
    chunks = [plan.with_chunk(MODEL, dense, asked, need + mib * vram.MIB).chunk_tokens for mib in (4000, 200, 0)]
    assert chunks[0] == 2048 > chunks[1] > chunks[2] == 0
    token = decode(SUPER, PUBLISHED, Method.SPLIT, 0.9)
    [line] = plan.first_token_table(SUPER, [PUBLISHED], 0.3, 0, token)
    assert f"{token.total_ms:.0f} ms for each" in line
    assert len(list(plan.first_token_table(SUPER, [PUBLISHED], 0.3, chunks[1], token))) == 2 + len(plan.PROMPTS)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(("dram", "disk"), [(60, 7), (70, 12)])
def test_ours_on_that_box(dram: float, disk: float) -> None:
    """Every term is there, and what the disk still costs is less than its reads take, one by one."""
    found = ours(SUPER, PUBLISHED.with_rates(dram, disk), 20)
    token = found.token
    parts = (token.dense_ms, token.handoff_ms, token.experts_ms, token.disk_exposed_ms)
    assert sum(parts) == pytest.approx(1000 / token.tok_s)
    assert all(part > 0 for part in parts)
    assert token.disk_exposed_ms < token.disk_ms
    assert (found.on_card, found.hits) == (0, pytest.approx(1 - token.disk_ms * disk * 1e6 / 880 / SUPER.block_bytes))
    assert ours(SUPER, PUBLISHED.with_rates(dram, disk), ALL_GB).token.disk_exposed_ms < token.disk_exposed_ms


def test_the_replay_is_the_formula_where_layers_do_not_matter() -> None:
    """The published way waits for all reads first, so that only their number counts, not how they fall on layers."""
    layer = layer_of(SUPER, PUBLISHED.rates, Method.GROUPS)
    clock = Clock(layer.gap_ns, layer.expert_ns, layer.read_ns, layer.overlapped, "off", late_ns=layer.late_ns)
    found = steady(generate("calibrated", 60), 30, 4915, clock, "lru")
    assert found.ms == pytest.approx(decode(SUPER, PUBLISHED, Method.GROUPS, found.hit_rate).total_ms, rel=0.01)


@pytest.mark.usefixtures("short")
def test_experts_on_the_card_need_neither_ram_nor_disk() -> None:
    without, some, more = (ours(SUPER, PUBLISHED, 20, card_gb) for card_gb in (0, 4, 8))
    assert 0 == without.on_card < some.on_card < more.on_card < 1
    assert without.token.experts_ms > some.token.experts_ms > more.token.experts_ms
    assert without.hits < some.hits < more.hits
    routing = made_up()
    kept = without_hottest(routing, 1000, 40)
    changed = kept.ids != routing.ids
    assert 0.05 < changed.mean() < 0.9
    rows = [set(row) - set(before) for row, before in zip(kept.ids.tolist(), routing.ids.tolist(), strict=True)]
    assert not any(rows), "what stands for an expert is named by the same token"
    assert ((kept.guesses[0] >= 0) <= (routing.guesses[0] >= 0)).all()
    assert (without_hottest(routing, 0, 40).ids == routing.ids).all()


@pytest.mark.usefixtures("short")
def test_a_card_with_room_keeps_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GIVEN[:2], "rtx5060ti16", *GIVEN[3:]]) == 0
    out = capsys.readouterr().out
    assert "blocks that stay there" in out
    assert "THIMBLE_ENGINE_VRAM_EXPERTS_GB=8." in out
    assert "% on the card" in out


def test_hits() -> None:
    assert 0.81 <= hit_rate(0.24) <= 0.84, "as published"
    assert (hit_rate(0.0), hit_rate(1.0), hit_rate(7.0)) == (0.0, 1.0, 1.0)
    assert hit_rate(0.3) > hit_rate(0.25)


def test_uneven_layers_cost_more_than_even_ones() -> None:
    from services.tools.predict import token

    hits = hit_rate(0.3)
    uneven = decode(SUPER, PUBLISHED, Method.SPLIT, hits)
    even = token(SUPER, PUBLISHED.rates, Method.SPLIT, (1 - hits) * 880)
    assert uneven.disk_ms == pytest.approx(even.disk_ms)
    assert uneven.disk_exposed_ms > even.disk_exposed_ms
    assert decode(SUPER, PUBLISHED, Method.COPY, hits).total_ms == pytest.approx(
        token(SUPER, PUBLISHED.rates, Method.COPY, (1 - hits) * 880).total_ms
    )


@pytest.mark.usefixtures("short")
def test_what_helps() -> None:
    """On a slow disk a second one or more RAM, on a fast one with enough RAM something else."""
    slow = upgrades(SUPER, PUBLISHED.with_rates(70, 2), 16)
    assert {slow[0].name[:11], slow[1].name[:11]} == {"as much RAM", "a second dr"}
    assert [upgrade.tok_s for upgrade in slow] == sorted((upgrade.tok_s for upgrade in slow), reverse=True)
    fast = upgrades(SUPER, PUBLISHED.with_rates(70, 12), 60)
    assert not fast[0].name.startswith(("as much RAM", "a second drive"))
    assert any(upgrade.name == "the same card with 8 GB more, for experts" for upgrade in fast)


def test_the_ram_ledger_adds_up_and_refuses() -> None:
    ledger = ram_ledger(MODEL, SUPER.blocks, 34.36, RamWanted())
    assert ledger.total_gb <= 34.36
    assert ledger.total_gb == pytest.approx(34.36, abs=0.01), "the slots get what is left"
    assert ledger.cache_gb > 20
    assert ram_ledger(MODEL, SUPER.blocks, 34.36, RamWanted(cache_gb=20)).cache_gb == pytest.approx(20, abs=0.004)
    assert ram_ledger(MODEL, SUPER.blocks, 200.0, RamWanted()).cache_gb == pytest.approx(ALL_GB), (
        "not more than there are"
    )
    with pytest.raises(PlanError, match=r"24\.0 GB of expert slots and .* do not fit 34\.4 GB .* lower --cache"):
        ram_ledger(MODEL, SUPER.blocks, 34.36, RamWanted(cache_gb=24))
    with pytest.raises(PlanError, match="the least number of expert slots"):
        ram_ledger(MODEL, SUPER.blocks, 8.6, RamWanted())
    wsl2 = ram_ledger(MODEL, SUPER.blocks, 34.36, RamWanted(wsl2=True))
    assert wsl2.cache_gb <= 17.18
    assert "WSL2 page-locks at most" in str(wsl2)
    with pytest.raises(PlanError, match=r"20\.0 GB of expert slots"):
        ram_ledger(MODEL, SUPER.blocks, 34.36, RamWanted(cache_gb=20, wsl2=True))


@pytest.mark.usefixtures("short")
def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    assert main([*GIVEN, "--cache", "20", "--record", str(path)]) == 0
    out = capsys.readouterr().out
    for word in (
        "16 PCIe lanes: no use",
        "RTX 5060, 8151 MiB",
        "dense weights",
        "Redis",
        "EXPERT_CACHE_GB=20",
        "a second drive",
        "tok/s",
    ):
        assert word in out
    *theirs, row, late = csv.DictReader(path.read_text().splitlines())
    assert [one["name"] for one in theirs] == ["plan.published_tok_s"] * 3
    assert "published 7.3-7.6" in theirs[1]["note"]
    assert row["name"] == "plan.rtx5060_tok_s"
    assert row["note"].startswith("predicted, not measured")
    low = ours(SUPER, PUBLISHED.with_rates(60, 7), 20).token.tok_s
    assert float(row["value"]) == pytest.approx(low, rel=0.02)
    assert late["name"] == "plan.rtx5060_late_tok_s"
    assert 0.9 * low < float(late["value"]) < low
    assert f"were it 340, as measured on a virtual machine: {float(late['value']):.1f} tok/s" in out
    assert "VRAM_EXPERTS" not in out, "there is no room"


def test_the_command_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GIVEN, "--cache", "30"]) == 1
    assert "30.0 GB of expert slots" in capsys.readouterr().err
    assert main([*GIVEN, "--context", "1000000", "--sequences", "4"]) == 1
    assert "does not fit into 8151 MiB of graphics memory" in capsys.readouterr().err
    assert main(["plan", "--gpu", "rtx4060", "--record", "x.csv"]) == 2
    with pytest.raises(SystemExit):
        main(["plan", "--gpu", "rtx9999"])


def test_a_measured_machine(
    demo_store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything is measured here but the card, which need not be there; for the demo's small blocks."""
    card = Card("Some card", 8151, 400.0, (0, 0), 30.0)
    monkeypatch.setattr(measure, "card", lambda: (card, 390.0, 25.0))
    for name, value in (("BLOCKS", 22), ("STEPS", 2), ("READ_BYTES", 1 << 24), ("PASSES", 1)):
        monkeypatch.setattr(measure, name, value)
    before = sorted(demo_store.folder.iterdir())
    assert main(["plan", "--ram", "32", "--store", str(demo_store.folder), "--context", "4096"]) == 0
    out = capsys.readouterr().out
    assert "Some card, 8151 MiB" in out
    assert "graphics memory 390.0, PCIe 25.0" in out
    assert "16 PCIe lanes" not in out, "how many it has is not known"
    assert sorted(demo_store.folder.iterdir()) == before, "the blocks are gone"


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("said", [(), ("--disk", "7"), ("--dram", "40")], ids=["nothing", "disk", "RAM"])
def test_a_pc_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: tuple[str, ...]
) -> None:
    """Nothing of this machine goes into its plan, and what was assumed is told."""

    def measured(*_: object) -> None:
        raise AssertionError("this machine was measured")

    monkeypatch.setattr(plan, "measured", measured)
    assert main(["plan", "--gpu", "rtx5060", "--ram", "32", *said]) == 0
    out = capsys.readouterr().out
    assert "assumed, for a PC that is not here" in out
    assert ("RAM 60-70 GB/s" in out) == ("--dram" not in said)
    assert ("disk 7-12 GB/s" in out) == ("--disk" not in said)
    tok_s = float(out.partition("What would help, from ")[2].split()[0])
    assert tok_s == pytest.approx(
        ours(SUPER, box(CARDS["rtx5060"], 34.4, 40 if "--dram" in said else 60, 7), 22.78).token.tok_s, rel=0.02
    )
    assert main(GIVEN) == 0
    assert "assumed, for" not in capsys.readouterr().out
    with pytest.raises(AssertionError, match="was measured"):
        main(["plan", "--gpu", "rtx5060", *said])


@pytest.mark.parametrize(
    "said", ["--ram=0", "--ram=-5", "--ram=nan", "--cache=nan", "--cache=-3", "--redis=-5", "--hot-states=-9",
             "--desktop=-100", "--disk=inf", "--sequences=0", "--context=-1", "--context=x"],
)  # fmt: skip
def test_what_no_machine_has_is_refused(capsys: pytest.CaptureFixture[str], said: str) -> None:
    with pytest.raises(SystemExit):
        main([*GIVEN, said])
    assert f"argument {said.partition('=')[0]}: " in capsys.readouterr().err


def test_the_disk_to_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "rtx5060", "--folder", str(tmp_path / "none")]) == 1
    assert "there is no such folder" in capsys.readouterr().err


def test_no_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(measure, "card", lambda: None)
    assert main(["plan"]) == 1
    assert "name one with --gpu" in capsys.readouterr().err


def test_a_range() -> None:
    assert plan.Range.parse("7-12").ends == (7.0, 12.0)
    assert plan.Range.parse("7").ends == (7.0,)
    for wrong in ("12-7", "x", "0", "-3", "nan", "inf", "7-inf"):
        with pytest.raises(argparse.ArgumentTypeError):
            plan.Range.parse(wrong)
