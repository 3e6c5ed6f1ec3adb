"""The VRAM ledger: its figures against the objects themselves, what fits an 8 GB card, and refusals with remedies."""

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kernels.attention.gpu import Workspace
from kernels.block import BlockLayout
from kernels.experts.decode_step import ExpertStep
from kernels.sampling.gpu import Sampler
from services.engine.config import EngineConfig
from services.engine.errors import MemoryPlanError
from services.engine.experts.store import DRAFT, Store
from services.engine.gpu import ledger as ledgers
from services.engine.gpu import plan as planning
from services.engine.gpu.head_token import HeadToken
from services.engine.gpu.ledger import CARD_MIB, DESKTOP_MIB, MIB, Kv, Wanted, ledger, longest_context, require
from services.engine.gpu.memory import DevicePool
from services.engine.gpu.plan import plan_device
from services.engine.gpu.token import Token
from services.engine.gpu.weights import DeviceWeights, HeadWeights
from services.engine.pages import PAGE_TOKENS
from services.engine.weights import draft_tensors
from services.tools import small_checkpoint
from services.tools.cli import main
from services.tools.repack import repack
from services.tools.synthetic_shapes import SMALL, SUPER, dense_layout

DENSE = dense_layout(SUPER)
CPU = torch.device("cpu")


def held_bytes(holder: object) -> int:
    """Of every tensor an object keeps, each memory once."""
    memories = {t.untyped_storage().data_ptr(): t for t in vars(holder).values() if isinstance(t, torch.Tensor)}
    return sum(t.untyped_storage().nbytes() for t in memories.values())


@pytest.mark.parametrize(("items", "rows", "top_k"), [(22, 1, 22), (32, 4, 22), (5, 2, 3)])
def test_an_expert_step_takes_what_the_ledger_says(items: int, rows: int, top_k: int) -> None:
    layout = BlockLayout(1024, 2688) if items > 5 else BlockLayout(64, 48)
    assert ledgers.step_bytes(layout, items, rows, top_k) == held_bytes(ExpertStep(layout, items, rows, top_k, CPU))


@pytest.mark.parametrize("tokens", [1, 256, 257, 100_000])
def test_attentions_workspace_takes_what_the_ledger_says(tokens: int) -> None:
    made = Workspace(3, SUPER.attention_heads, SUPER.head_dim, tokens, PAGE_TOKENS, CPU)
    assert ledgers.attention_bytes(SUPER, 3, tokens) == held_bytes(made)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_token_takes_what_the_ledger_says(rows: int) -> None:
    """Every tensor of the real token on the device, at the real shape."""
    tokens = 5000
    weights, pool = SimpleNamespace(config=SUPER), SimpleNamespace(conv=torch.zeros(1), kept=None)
    turns = SimpleNamespace(guesses=22)
    token = Token(weights, pool, SimpleNamespace(tokens=rows), turns, tokens)  # type: ignore[arg-type]
    del token.host_logits, token.x  # the host's; the inputs' own
    found = held_bytes(token) + token.inputs.x.nbytes + token.inputs.numbers.nbytes
    tables = rows * (3 + math.ceil(tokens / PAGE_TOKENS)) * 4
    assert found == rows * (ledgers.row_bytes(SUPER) + 4 * SUPER.vocab_size) + tables
    assert ledgers.attention_bytes(SUPER, rows, tokens) == held_bytes(token.workspace)


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_states_and_pages_take_what_the_ledger_says(kv: Kv) -> None:
    pool = DevicePool(SMALL, CPU, places=3, pages=7, kv=kv)
    lines = dict(ledger(SMALL, dense_layout(SMALL), Wanted(3, 500, kv, pages=7)).lines)
    assert lines[f"KV, 7 pages of {PAGE_TOKENS} tokens in {kv}"] == pool.keys.nbytes + pool.values.nbytes
    assert lines["a block of keys and values that comes back"] == pool._landing.nbytes
    assert len(pool.stage(bytes(pool._landing.nbytes))) == pool._landing.nbytes, "in no other memory"
    states = "states of 3 sequences, SSM and convolution in float32"
    assert lines[states] == pool.conv.nbytes + pool.ssm.nbytes
    drafts = dict(ledger(SMALL, dense_layout(SMALL), Wanted(3, 500, kv, drafts=True)).lines)
    kept = DevicePool(SMALL, CPU, places=3, pages=7, kv=kv, drafts=True).kept
    assert kept is not None
    steps = 2 * 4 * len(SMALL.mamba_layers) * SMALL.mamba_heads
    assert drafts["what Mamba layers keep of drafts"] == kept.nbytes + steps
    one_more = DevicePool(SMALL, CPU, places=3, pages=7, kv=kv, head=True)
    headed = dict(ledger(SMALL, dense_layout(SMALL), Wanted(3, 500, kv, pages=7, head_bytes=1000)).lines)
    assert headed[f"KV, 7 pages of {PAGE_TOKENS} tokens in {kv}"] == one_more.keys.nbytes + one_more.values.nbytes
    assert headed["multi-token-prediction block"] == 1000 + ledgers.head_bytes(SMALL, 3)


def test_the_block_that_drafts_takes_what_the_ledger_says(tmp_path: Path) -> None:
    """Its weights against the loader's own count, its buffers against what they hold; one id and two are a graph."""
    store = repack(small_checkpoint.write(tmp_path / "c"), tmp_path / "store", say=lambda _: None)
    draft, config = store.draft(), store.config
    assert draft is not None
    weights = HeadWeights.load(draft, DeviceWeights.load(store.dense(), config, CPU), CPU)
    layout = ledgers.read_layout(store.folder / DRAFT)
    assert ledgers.head_weight_bytes(config, layout) == weights.network.size_bytes
    pool, turns = DevicePool(config, CPU, places=2, pages=2, head=True), cast(Any, SimpleNamespace(guesses=0))
    own = 0
    for rows in ledgers.HEAD_ROWS:
        token = HeadToken(weights, pool, cast(Any, SimpleNamespace(tokens=rows)), turns, 100)
        own += sum(each.nbytes for each in (token.before, token.x, token.normed, token.both))
    assert ledgers.head_bytes(config, 2) == own + 2 * ledgers.HIDDEN_STATES * 4 * config.hidden_size
    plain, headed = (ledger(config, layout, Wanted(head_bytes=size)) for size in (0, 1))
    rows = sum(ledgers.HEAD_ROWS)
    assert headed.total_bytes - plain.total_bytes > rows * ledgers.row_bytes(config) + 2 * ledgers.GRAPH_BYTES


@pytest.mark.parametrize(
    ("card_mib", "settings", "headed"),
    [(8000, {}, False), (8000, {"prefill_chunk_tokens": 512}, True), (9000, {}, True)],
    ids=str,
)
def test_the_block_that_drafts_is_on_a_card_that_has_room_for_a_context_too(
    card_mib: int, settings: dict[str, Any], headed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BF16, as published; whether it is there changes how long a context can be, and nothing else."""
    expected = draft_tensors(SUPER)
    draft = {name: ("BF16", shape) for name, shape in expected.plain.items()}
    draft |= {f"{name}.weight": ("BF16", shape) for name, shape in expected.linears.items()}
    monkeypatch.setattr(planning, "stored_layout", lambda _: DENSE)
    monkeypatch.setattr(planning, "read_layout", lambda _: draft)
    store = SimpleNamespace(config=SUPER, folder=Path(), vision=lambda: None, draft_file=object())
    free_bytes = card_mib * MIB - ledgers.CONTEXT_BYTES
    config = EngineConfig(max_sequences=1, speculation="on", **settings)
    plan = plan_device(config, cast(Store, store), free_bytes)
    auto = plan_device(replace(config, speculation="auto"), cast(Store, store), free_bytes)
    assert auto.ledger.wanted.head_bytes == plan.ledger.wanted.head_bytes
    assert (plan.ledger.wanted.head_bytes > 200 * MIB) == headed
    assert plan.context_tokens >= 16_384
    assert plan.ledger.total_bytes <= card_mib * MIB
    off = plan_device(replace(config, speculation="off"), cast(Store, store), free_bytes)
    assert off.ledger.wanted.head_bytes == 0
    assert off.context_tokens > plan.context_tokens
    assert (off.sequences, off.chunk_tokens) == (plan.sequences, plan.chunk_tokens)


def test_weights_take_what_the_ledger_says(demo_store: Store) -> None:
    """Against the loader's own count of what it sends, in every format."""
    loaded = DeviceWeights.load(demo_store.dense(), demo_store.config, CPU)
    assert ledgers.dense_bytes(demo_store.config, ledgers.stored_layout(demo_store.folder)) == loaded.size_bytes


def test_sampling_takes_what_the_ledger_says() -> None:
    sampler, vocabulary = Sampler(2, 5000, CPU), 5000
    others = 4 * vocabulary + 4 * math.ceil(vocabulary / 32) + 4 * vocabulary  # logits, mask, counts
    assert 2 * ledgers.sampling_bytes(vocabulary) == held_bytes(sampler) + 2 * others


def test_a_token_of_context_takes_what_is_published() -> None:
    assert ledgers.page_bytes(SUPER, "bf16") == PAGE_TOKENS * 8192
    assert ledgers.page_bytes(SUPER, "fp8") == PAGE_TOKENS * 4096


def test_super_is_as_large_as_the_design_says() -> None:
    assert ledgers.dense_bytes(SUPER, DENSE) / 2**30 == pytest.approx(6.6, abs=0.05)
    assert dict(ledger(SUPER, DENSE, Wanted()).lines)[
        "states of 1 sequences, SSM and convolution in float32"
    ] == pytest.approx(165 * MIB, rel=0.01)


def test_what_fits_an_8_gb_card() -> None:
    """Four sequences with nothing else on the card, one beside a desktop; one page more no longer fits."""
    for budget_mib, sequences in ((CARD_MIB, 4), (DESKTOP_MIB, 1)):
        wanted = Wanted(sequences)
        longest = longest_context(SUPER, DENSE, wanted, budget_mib * MIB)
        assert longest > 3000
        require(SUPER, DENSE, replace(wanted, context_tokens=longest), budget_mib * MIB)
        with pytest.raises(MemoryPlanError):
            require(SUPER, DENSE, replace(wanted, context_tokens=longest + 1), budget_mib * MIB)
    assert longest_context(SUPER, DENSE, Wanted(2), DESKTOP_MIB * MIB) == 0


def test_a_context_is_no_longer_than_the_models() -> None:
    assert longest_context(SUPER, DENSE, Wanted(), 100_000 * MIB) == SUPER.context_tokens


@pytest.mark.parametrize(
    ("wanted", "budget_mib", "remedies"),
    [
        (Wanted(4, 6000), CARD_MIB, ["FP8", "lower the context to 4288 tokens", "lower the sequences to 3"]),
        (Wanted(4, 8192), DESKTOP_MIB, ["lower the sequences to 1"]),
        (Wanted(1, 200_000), CARD_MIB, ["lower the context to 90560 tokens"]),
        (Wanted(2, 200_000), DESKTOP_MIB, ["lower the sequences to 1 and the context to 28352 tokens, with keys"]),
        (Wanted(3, 64), 7200, ["repack --dense fp8, which changes the weights, saves 320 MiB, enough for one"]),
        (Wanted(1, 64), 6144, ["nothing that can be set makes it fit"]),
    ],
)
def test_a_refusal_says_what_to_change(wanted: Wanted, budget_mib: int, remedies: list[str]) -> None:
    with pytest.raises(MemoryPlanError) as refused:
        require(SUPER, DENSE, wanted, budget_mib * MIB)
    message = str(refused.value)
    assert f"does not fit into {budget_mib} MiB" in message
    assert re.search(r"it takes \d+\.\d MiB \(dense weights", message)
    missing = [remedy for remedy in remedies if remedy not in message]
    assert not missing, message


def test_all_experts_that_stay_on_the_card_can_be_computed_there_in_one_step() -> None:
    """One that could not would be read from RAM, or from disk by then."""
    for rows in (1, 2, 4):
        kept = ledgers.most_items(rows, SUPER.experts_per_token, kept_blocks=100)
        assert kept == rows * SUPER.experts_per_token
        assert ledgers.most_items(rows, SUPER.experts_per_token, kept_blocks=0) == min(kept, ledgers.MOST_ITEMS)
    wanted = Wanted(sequences=4, context_tokens=512, kept_blocks=1)
    steps = dict(ledger(SUPER, DENSE, wanted).lines)["expert steps for 4 batch sizes"]
    made = [ledgers.step_bytes(SUPER.block, rows * 22, rows, 22) for rows in (1, 2, 3, 4)]
    assert steps == sum(made)


def test_experts_that_stay_on_the_card_are_counted_and_can_be_left_out(demo_store: Store) -> None:
    wanted = Wanted(context_tokens=4096)
    kept = replace(wanted, kept_blocks=1000)
    more_bytes = ledger(SUPER, DENSE, kept).total_bytes - ledger(SUPER, DENSE, wanted).total_bytes
    assert more_bytes == 1000 * SUPER.block.block_bytes
    with pytest.raises(MemoryPlanError, match="keep fewer experts on the card"):
        require(SUPER, DENSE, kept, CARD_MIB * MIB)
    assert require(SUPER, DENSE, kept, 12288 * MIB)
    blocks = sum(map(len, demo_store.blocks))
    for asked_gb, expected in ((0.0, 0), (0.001, int(1e6 / demo_store.layout.block_bytes)), (100.0, blocks)):
        plan = plan_device(EngineConfig(vram_experts_gb=asked_gb), demo_store, free_bytes=16311 * MIB)
        assert plan.ledger.wanted.kept_blocks == expected


def test_more_sequences_than_a_step_takes_have_a_state_but_no_graph() -> None:
    four, nine = (dict(ledger(SUPER, DENSE, Wanted(sequences, 64)).lines) for sequences in (4, 9))
    same = [name for name in four if "batch sizes" in name or name.startswith(("activations", "logits"))]
    assert len(same) == 5
    assert all(nine[name] == four[name] for name in same)
    one = ledgers.state_bytes(SUPER)
    assert nine["states of 9 sequences, SSM and convolution in float32"] == 9 * one


def test_rows_for_short_prompts_are_graphs_of_their_own_where_sequences_bring_none() -> None:
    one, joined, four = (ledger(SUPER, DENSE, wanted) for wanted in (Wanted(), Wanted(joined=True), Wanted(4)))
    assert joined.wanted.step_rows == (1, 2, 4)
    own = [
        2 * ledgers.GRAPH_BYTES,
        6 * (ledgers.row_bytes(SUPER) + ledgers.sampling_bytes(SUPER.vocab_size) + 4 * (3 + 4096 // PAGE_TOKENS)),
        ledgers.attention_bytes(SUPER, 6, 4096),
        *(ledgers.step_bytes(SUPER.block, 32, rows, 22) for rows in (2, 4)),
    ]
    assert joined.total_bytes - one.total_bytes == sum(own)
    assert ledger(SUPER, DENSE, Wanted(4, joined=True)).total_bytes == four.total_bytes


def test_every_remedy_is_true() -> None:
    wanted, budget_bytes = Wanted(4, 6000), CARD_MIB * MIB
    told = ledgers.remedies(SUPER, DENSE, wanted, budget_bytes)
    changes: dict[str, dict[str, Any]] = {
        "keep keys": {"kv": "fp8"},
        "lower the context": {"context_tokens": 4288},
        "lower the sequences": {"sequences": 3},
    }
    for start, change in changes.items():
        assert any(remedy.startswith(start) for remedy in told)
        require(SUPER, DENSE, replace(wanted, **change), budget_bytes)


def test_fp8_is_no_remedy_where_nothing_is_left_to_round() -> None:
    quantised = dense_layout(SUPER, "3-fp8")
    assert ledgers.fp8_saves_bytes(SUPER, quantised) == 0
    assert ledgers.remedies(SUPER, quantised, Wanted(1, 64), 6000 * MIB) == [
        "free memory on the card, or use a larger one: nothing that can be set makes it fit"
    ]


@pytest.mark.parametrize("wrong", [{"sequences": 0}, {"context_tokens": 0}, {"kv": "int4"}])
def test_what_no_card_can_do_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(MemoryPlanError):
        Wanted(**wrong)


def test_the_command(capsys: pytest.CaptureFixture[str], demo_store: Store, tmp_path: Path) -> None:
    assert main(["ledger", "--shape", "super"]) == 0
    printed = capsys.readouterr().out
    assert "8151 MiB, nothing else on the card: fits" in printed
    assert "7550 MiB, with a desktop" in printed
    assert main(["ledger", "--shape", "super", "--vram-mib", "6000"]) == 1
    assert "does not fit into 6000 MiB" in capsys.readouterr().err
    assert main(["ledger", str(demo_store.folder), "--vram-mib", "8151"]) == 0
    assert "8151 MiB, as given: fits" in capsys.readouterr().out
    assert SMALL.experts < SUPER.experts
    assert main(["ledger", "--shape", "super", "--chunk", "256", "--locked", "22.8"]) == 0
    printed = capsys.readouterr().out
    assert "reading 256 tokens of prompts at once" in printed
    assert "42.5 MiB  page tables of 22.8 GB of RAM that the card reads" in printed
    assert main(["ledger", "--shape", "super", "--pictures"]) == 0
    assert "217.7 MiB  vision ring and activations" in capsys.readouterr().out
    assert main(["ledger", str(demo_store.folder), "--pictures"]) == 0
    assert "vision ring and activations" in capsys.readouterr().out
    blind = repack(small_checkpoint.write(tmp_path / "c"), tmp_path / "store", say=lambda _: None)
    assert main(["ledger", str(blind.folder), "--pictures"]) == 1
    assert "this model does not see" in capsys.readouterr().err


def test_the_engine_refuses_at_start_what_does_not_fit(demo_store: Store) -> None:
    config = EngineConfig(store=demo_store.folder, max_sequences=2, context_tokens=1000)
    told = str(plan_device(config, demo_store, free_bytes=400 * MIB))
    assert "700.0 MiB  can be had" in told
    assert "KV, 32 pages" in told
    with pytest.raises(MemoryPlanError, match="does not fit into 302 MiB of graphics memory"):
        plan_device(config, demo_store, free_bytes=2 * MIB)


def test_what_the_card_reads_of_ram_takes_page_tables_there() -> None:
    plain, locked = (ledger(SUPER, DENSE, Wanted(locked_bytes=size)) for size in (0, 1 << 30))
    assert locked.total_bytes - plain.total_bytes == 2 * MIB
    assert "page tables of 1.1 GB of RAM that the card reads" in str(locked)
    assert "that the card reads" not in str(plain)


def test_short_chunks_take_little_of_a_card() -> None:
    """Of 8 GB beside a desktop less than 100 MiB are left for prompts and context."""
    taken = {chunk: ledgers.sweep_bytes(SUPER, chunk, 8192) / MIB for chunk in planning.CHUNKS}
    assert taken == pytest.approx({2048: 217, 1024: 113.5, 512: 61.5, 256: 35.5, 0: 0}, abs=0.6)
    for chunk in planning.CHUNKS[:-1]:
        made = ledgers.products_bytes(SUPER.block, SUPER.experts_per_token, chunk)
        assert ledgers.sweep_scratch_bytes(SUPER, chunk) == made, "other layers have room in what the experts need"
