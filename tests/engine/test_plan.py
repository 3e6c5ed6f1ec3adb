"""The plan: automatic sizes, the ledger, and refusals that say what to change."""

from dataclasses import replace
from pathlib import Path

import pytest

from services.engine import plan as planning
from services.engine.config import EngineConfig
from services.engine.errors import MemoryPlanError
from services.engine.experts.store import Store
from services.engine.model import Model
from services.engine.pages import PAGE_TOKENS, PagePool
from services.engine.plan import GB, Machine, dense_bytes, make_plan
from services.engine.state import State
from services.engine.weights import dense_tensors
from services.tools import small_checkpoint, synthetic_vision
from services.tools.repack import repack

MACHINE = Machine(available_bytes=4 * GB, cores=6)


def planned(store: Store, machine: Machine = MACHINE, **settings: object) -> planning.Plan:
    return make_plan(EngineConfig(**settings), store, machine)  # type: ignore[arg-type]


def test_automatic_sizes(demo_store: Store) -> None:
    plan = planned(demo_store)
    assert (plan.workers, plan.readers) == (4, 0)
    assert plan.slots == plan.blocks == sum(map(len, demo_store.layers)) > 300, "the demo fits: every block has a slot"
    assert plan.context_tokens == 4096, "the model's own"
    assert plan.pages == 4 * 4096 // PAGE_TOKENS, "more than all sequences can use are not taken"
    assert planned(demo_store, Machine(4 * GB, 1)).workers == 1


def test_a_large_machine_keeps_a_margin(demo_store: Store) -> None:
    """All that is left but the margin, once that is more than half; what cannot be page-locked is not counted on."""
    margin, block_bytes = 100 * demo_store.layout.block_bytes, demo_store.layout.block_bytes
    ample = planned(demo_store)
    rest = sum(size for name, size in ample.ledger if not name.startswith("experts"))
    free = Machine(rest + 350 * block_bytes, 2)
    assert planned(demo_store, free, memory_margin_gb=margin / GB).slots == 250
    assert planned(demo_store, free).slots == 175
    limited = replace(free, pinned_bytes=130 * block_bytes)
    assert planned(demo_store, limited, memory_margin_gb=margin / GB).slots == 130


def test_a_small_machine_gets_half_of_what_is_left(demo_store: Store) -> None:
    ample = planned(demo_store)
    rest = sum(size for name, size in ample.ledger if not name.startswith("experts"))
    plan = planned(demo_store, Machine(rest + 100 * demo_store.layout.block_bytes, 2))
    assert plan.slots == 50


@pytest.mark.parametrize(
    ("settings", "slots"),
    [({"expert_slots": 44}, 44), ({"expert_slots": 9999}, None), ({"expert_cache_gb": 0.0011}, 53)],
    ids=["exact", "more than there are", "gigabytes"],
)
def test_the_cache_is_as_large_as_asked(demo_store: Store, settings: dict[str, object], slots: int | None) -> None:
    assert demo_store.layout.block_bytes == 20480
    every = sum(map(len, demo_store.layers))
    assert planned(demo_store, **settings).slots == (every if slots is None else slots)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert_slots": 5}, "THIMBLE_ENGINE_EXPERT_SLOTS=5 holds 5 expert blocks, a token needs 6 at once"),
        ({"expert_cache_gb": 0.00001}, r"THIMBLE_ENGINE_EXPERT_CACHE_GB=1e-05 holds 0 .* set it to at least 0.000123"),
        ({"context_tokens": 100_000, "kv_gb": 0.01}, "THIMBLE_ENGINE_KV_GB=0.01 holds .* a context of 100000 needs"),
        ({"hot_states_gb": 5.0}, "does not fit into this machine's memory: .*; lower THIMBLE_ENGINE_EXPERT_CACHE_GB"),
        ({"expert_cache_gb": 1.0, "hot_states_gb": 4.0}, "in all 5.5[0-9]+ GB, available 4.000 GB"),
    ],
    ids=["slots", "cache", "context", "hot", "ledger"],
)
def test_what_does_not_fit_says_what_to_change(demo_store: Store, settings: dict[str, object], message: str) -> None:
    with pytest.raises(MemoryPlanError, match=message):
        planned(demo_store, **settings)


def test_the_ledger_is_what_is_taken(demo_store: Store) -> None:
    """Its figures against the objects themselves."""
    plan = planned(demo_store, expert_slots=44, max_sequences=3)
    model = Model(demo_store.dense(), demo_store.config, experts=None)  # type: ignore[arg-type]
    tensors = {id(t): t for t in walk(model)}
    assert sum(t.nbytes for t in tensors.values()) == pytest.approx(
        dense_bytes(dense_tensors(demo_store.config)), rel=0.001
    )
    sizes = dict(plan.ledger)
    pool = PagePool(demo_store.config, plan.pages, drafts="mtp" in plan.drafts)
    assert sizes[f"KV, {plan.pages} pages of {PAGE_TOKENS} tokens"] == pool.size_bytes
    assert sizes["states of 3 sequences"] == 3 * State(demo_store.config, pool).size_bytes
    assert sizes[f"experts, 44 of {sum(map(len, demo_store.layers))} blocks"] == 44 * demo_store.layout.block_bytes
    assert "in all" in str(plan)


def walk(model: Model) -> list:  # type: ignore[type-arg]
    import torch

    found, todo, seen = [], [vars(model)], set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            todo += value.values()
        elif isinstance(value, list | tuple):
            todo += value
        elif hasattr(value, "__dict__") and type(value).__module__ == Model.__module__:
            todo.append(vars(value))
    return found


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "CGROUP", tmp_path)
    free = Machine.here().available_bytes
    assert free > GB // 10
    (tmp_path / "memory.max").write_text("50000000\n")
    (tmp_path / "memory.current").write_text("20000000\n")
    assert Machine.here().available_bytes == 30_000_000
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 7000000\n")
    assert Machine.here().available_bytes == 37_000_000, "files in memory give way"
    (tmp_path / "memory.max").write_text("max\n")
    assert Machine.here().available_bytes == pytest.approx(free, rel=0.5)


def test_an_older_containers_limit_counts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "CGROUP", tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("60000000\n")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("20000000\n")
    assert Machine.here().available_bytes == 40_000_000


def test_wsl2_is_known_by_its_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine.here().pinned_bytes is None
    monkeypatch.setattr(planning, "OSRELEASE", tmp_path / "osrelease")
    (tmp_path / "osrelease").write_text("5.15.167.4-microsoft-standard-WSL2\n")
    pinned = Machine.here().pinned_bytes
    assert pinned is not None
    assert GB // 10 < pinned < 2**50


def test_a_model_without_attention_needs_no_pages(demo_store: Store) -> None:
    layers = tuple("mamba" if layer == "attention" else layer for layer in demo_store.config.layers)
    store = replace(demo_store, config=replace(demo_store.config, layers=layers))
    assert planned(store).context_tokens == 4096


def test_vision_weights_stay_in_ram_only_where_nothing_else_could_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card: their ring is in the ledger, and all of them once every expert has its slot and much is left."""
    made = small_checkpoint.write(tmp_path / "c", "3.5-super-vl")
    store = repack(made, tmp_path / "store", say=lambda text: None)
    weights = synthetic_vision.holes(tmp_path / "vision.safetensors")  # of the real shape
    monkeypatch.setattr(Store, "vision", lambda self: weights)
    config, card_bytes = EngineConfig(max_sequences=1, context_tokens=64), 4 << 30

    def made_on(machine: Machine, card_free_bytes: int | None = card_bytes) -> planning.Plan:
        return make_plan(config, store, machine, card_free_bytes)

    ample = made_on(Machine(20 * GB, 6))
    lines = dict(ample.ledger)
    assert ample.vision_resident
    assert lines["ring of vision weights, page-locked"] == pytest.approx(79e6, rel=0.01)
    assert lines["the rest of the vision weights, which stay"] == pytest.approx(1.681e9 - 79e6, rel=0.01)
    assert not made_on(Machine(20 * GB, 6, pinned_bytes=10 * GB)).vision_resident, "page-locked memory is scarce"
    little = made_on(Machine(sum(lines.values()), 6))
    assert not little.vision_resident, "just enough is no reason"
    assert "the rest of the vision weights, which stay" not in dict(little.ledger)
    on_the_cpu = dict(made_on(Machine(20 * GB, 6), None).ledger)
    assert "ring of vision weights, page-locked" not in on_the_cpu
    assert on_the_cpu["one picture being read, at most"] > lines["one picture being read, at most"]
    small = 10 * store.layout.block_bytes
    scarce = made_on(Machine(20 * GB, 6, pinned_bytes=int(lines["ring of vision weights, page-locked"]) + small))
    assert scarce.slots == 10 < scarce.blocks, "the ring is page-locked too"
